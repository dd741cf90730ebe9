"""Whether two engines gave the same answers, and where not, whether the model itself was undecided there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from jaxserve.engine import EngineCore
from jaxserve.request import GenerationRequest, SamplingParams
from jaxserve.workload.traced_request import Workload

# Two best tokens closer than this (natural logarithm) may come out in either order. float32: what this project's
# exactness tests allow. bfloat16: twice the distance of neighbouring values at logits of 16 to 32.
NEAR_TIE: Mapping[str, float] = MappingProxyType({"float32": 1e-4, "bfloat16": 0.25})


@dataclass(frozen=True, slots=True)
class Difference:
    """Two outputs of one request part ways. What follows the first differing token says nothing more.

    Attributes:
      request: its index in the workload.
      position: of the first differing output token.
      margin: distance of the two best logits there.
    """

    request: int
    position: int
    margin: float


def find_differences(
    engine: EngineCore,
    workload: Workload,
    left: Sequence[Sequence[int]],
    right: Sequence[Sequence[int]],
) -> list[Difference]:
    """Compare outputs, request by request.

    Args:
      engine: idle; computes the margins.
      left, right: output token ids of each request.
    """
    differences = []
    for index, (one, other) in enumerate(zip(left, right, strict=True)):
        if one != other:
            position = next(i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b)
            context = (*workload.requests[index].prompt_token_ids, *one[:position])
            differences.append(Difference(index, position, _margin(engine, context)))
    return differences


def _margin(engine: EngineCore, context: tuple[int, ...]) -> float:
    """Distance of the two best logits after `context`."""
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=2)
    engine.submit(GenerationRequest("bench-margin", context, params))
    margin = float("inf")
    while engine.has_work():
        for output in engine.step():
            for entry in output.logprobs or ():
                (_, best), (_, second) = entry.top
                margin = best - second
    return margin
