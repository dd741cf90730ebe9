"""What became of a case, as plain data that goes through JSON between processes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from scripts.aot.cases import KernelCase, StepCase
from scripts.aot.dumps import Kernel


@dataclass(frozen=True)
class StepFacts:
    """What matters of a compiled step.

    Attributes:
      arguments, temporaries, aliased: bytes, from XLA's memory analysis.
      state: bytes of the donated state, all of which has to be aliased.
      caches, layer_keys: bytes of the KV cache, and of one layer's keys in it.
      copies: instructions that make an array as large as a layer's keys.
      attention_calls: Pallas kernels that the program launches.
    """

    arguments: int
    temporaries: int
    aliased: int
    state: int
    caches: int
    layer_keys: int
    copies: list[str]
    attention_calls: int


@dataclass(frozen=True)
class Result:
    """Attributes:
    outcome: "compiled"; "refused" by the backend; "failed" (an exception, or the process died); or "not run".
    detail: why not compiled.
    kernels: the Pallas kernels of the program.
    step: of a `StepCase`.
    """

    case: KernelCase | StepCase
    outcome: Literal["compiled", "refused", "failed", "not run"]
    detail: str = ""
    lower_seconds: float = 0.0
    compile_seconds: float = 0.0
    kernels: list[Kernel] = field(default_factory=list)
    step: StepFacts | None = None

    def as_json(self) -> dict[str, Any]:
        return {"kind": type(self.case).__name__, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Result:
        data = dict(data)
        case_type = {"KernelCase": KernelCase, "StepCase": StepCase}[data.pop("kind")]
        return cls(
            **{
                **data,
                "case": case_type(**data["case"]),
                "kernels": [Kernel(**kernel) for kernel in data["kernels"]],
                "step": data["step"] and StepFacts(**data["step"]),
            }
        )
