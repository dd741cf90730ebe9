"""What decides how an engine schedules and computes, as JSON values: to make the same one again, or to see why not."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from dataclasses import dataclass
from typing import Any

import msgspec

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.config import GenerationDefaults, ModelConfig, ResolvedConfig
from jaxserve.engine import EngineCore
from jaxserve.scheduler.host_tier import HostSpace

_PACKAGES = ("jaxserve", "jax", "jaxlib", "numpy")


@dataclass(frozen=True, slots=True)
class EngineDescription:
    """An engine apart from its weights.

    Attributes:
      num_blocks: KV blocks of its pool. host: of those in host memory.
      shapes: (tokens, sequences) of every bucket.
      versions: of the packages that compute.
    """

    model_name: str
    config: ResolvedConfig
    model_config: ModelConfig
    generation: GenerationDefaults
    num_blocks: int
    host: HostSpace
    shapes: tuple[tuple[int, int], ...]
    versions: dict[str, str]

    def buckets(self) -> ShapeBuckets:
        """Its shapes."""
        tokens = sorted({shape[0] for shape in self.shapes})
        seqs = {size: tuple(sorted(s for t, s in self.shapes if t == size)) for size in tokens}
        return ShapeBuckets(tuple(seqs.items()), self.config.max_blocks_per_seq)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_dict(cls, value: Any) -> EngineDescription:
        """Raises ValueError, in one line, for what is none."""
        return msgspec.convert(value, cls)


def describe_engine(engine: EngineCore) -> EngineDescription:
    """The description of an engine."""
    return EngineDescription(
        model_name=engine.model_name,
        config=engine.config,
        model_config=engine.model_config,
        generation=engine.generation,
        num_blocks=engine.stats.num_blocks,
        host=engine.host,
        shapes=tuple(sorted(engine.stats.by_bucket)),
        versions=versions(),
    )


def versions() -> dict[str, str]:
    """Of Python and the packages that compute, as installed here."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # run from a checkout
            found[name] = "unknown"
    return found


def first_mismatch(recorded: EngineDescription, actual: EngineDescription) -> str | None:
    """The first thing that keeps `actual` from doing what `recorded` did, or None. Versions are not looked at."""
    for part in ("config", "model_config", "generation"):
        mine, theirs = getattr(actual, part), getattr(recorded, part)
        for field in dataclasses.fields(theirs):
            if getattr(mine, field.name) != getattr(theirs, field.name):
                return f"{field.name} is {getattr(mine, field.name)!r}, recorded was {getattr(theirs, field.name)!r}"
    if actual.num_blocks != recorded.num_blocks:
        return f"the KV cache has {actual.num_blocks} blocks, recorded were {recorded.num_blocks}"
    if actual.host != recorded.host:
        return f"host memory is {actual.host}, recorded was {recorded.host}"
    if actual.shapes != recorded.shapes:
        return f"there are {len(actual.shapes)} shapes, other ones than the {len(recorded.shapes)} recorded"
    return None
