"""Which tile sizes are tried, and which rows the table gets."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pallas_kernels.paged_attention.tuning import ShapeClass, Table, TuningConfig

DECODE, PREFILL, SPLIT = "decode", "prefill", "split"

# Fields that a part tunes. Splits come after the tiles that they consist of.
FIELDS = {
    DECODE: ("decode_block_k", "decode_stages", "decode_warps"),
    SPLIT: ("split_tokens",),
    PREFILL: ("prefill_block_q", "prefill_block_k", "prefill_stages", "prefill_warps"),
}
_VALUES: dict[str, dict[str, tuple[int, ...]]] = {
    "pallas-triton": {
        "decode_block_k": (64, 32, 128),
        "decode_stages": (3, 2, 4),
        "decode_warps": (4, 2, 8),
        "split_tokens": (256, 512, 1024, 2048),
        "prefill_block_q": (64, 128),
        "prefill_block_k": (64, 32, 128),
        "prefill_stages": (3, 2, 4),
        "prefill_warps": (4, 8),
    },
    # The shape of a Mosaic kernel fixes its warps and the rows of its prefill tiles.
    "pallas-mosaic-gpu": {
        "decode_block_k": (64, 128),
        "decode_stages": (3, 2, 4, 6),
        "split_tokens": (256, 512, 1024, 2048),
        "prefill_block_k": (64, 128),
        "prefill_stages": (2, 3, 4),
    },
}
_SHARED_MEMORY = 227 * 1024  # of a block on Hopper


@dataclass(frozen=True)
class Target:
    """A row of the table to be measured.

    Attributes:
      head_dim, dtype, kv_dtype: of the calls it is measured with.
    """

    backend: str
    head_dim: int
    dtype: str
    kv_dtype: str

    def __str__(self) -> str:
        return f"{self.backend} head_dim {self.head_dim} {self.dtype} over {self.kv_dtype}"


def targets() -> list[Target]:
    """Every row worth measuring, most used first."""
    halves = [Target(b, d, "bfloat16", "bfloat16") for d in (128, 64, 256) for b in reversed(_VALUES)]
    quantised = [Target(b, d, "bfloat16", "int8") for d in (128, 64) for b in reversed(_VALUES)]
    quantised.append(Target("pallas-triton", 256, "bfloat16", "int8"))
    full = [Target("pallas-triton", d, "float32", "float32") for d in (64, 128, 256)]
    return [*halves, *quantised, *full]


def candidates(target: Target, part: str, base: TuningConfig) -> list[TuningConfig]:
    """Configurations to try for a part, the base first; those that can't fit or divide are left out."""
    values = _VALUES[target.backend]
    fields = [name for name in FIELDS[part] if name in values]
    tried = [base]
    for chosen in itertools.product(*(values[name] for name in fields)):
        changes: dict[str, Any] = dict(zip(fields, chosen, strict=True))
        tried.append(dataclasses.replace(base, **changes))
    return [config for config in dict.fromkeys(tried) if config == base or _is_possible(target, part, config)]


def fields_of(part: str, config: TuningConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in FIELDS[part]}


def _is_possible(target: Target, part: str, config: TuningConfig) -> bool:
    if part == PREFILL:
        block_k, stages = config.prefill_block_k, config.prefill_stages
    else:
        block_k, stages = config.decode_block_k, config.decode_stages
        if config.split_tokens % block_k:
            return False
    number = {"float32": 4, "bfloat16": 2, "float16": 2}.get(target.kv_dtype, 1)
    tiles = 2 * stages * block_k * target.head_dim * number
    if target.backend == "pallas-mosaic-gpu" and number == 1:
        # Queries, and a tile of keys and one of values widened; for each of the two pairs that decode.
        tiles += (128 if part == PREFILL else 64) * target.head_dim * 2 + 2 * block_k * target.head_dim * 2
        tiles *= 1 if part == PREFILL else 2
    return tiles <= _SHARED_MEMORY


def fastest(times: dict[TuningConfig, float]) -> TuningConfig:
    """The first of the fastest; the base, tried first, wins ties."""
    return min(times, key=lambda config: times[config])


def with_row(table: Table, backend: str, shape: ShapeClass, config: TuningConfig, *, source: str) -> Table:
    """The table with this row added, or in the place of the one of its class."""
    others = [row for row in table if row[:2] != (backend, shape)]
    return [*others, (backend, shape, dataclasses.replace(config, source=source))]


def describe(configs: Iterable[TuningConfig], part: str) -> list[dict[str, Any]]:
    """What a dry run lists."""
    return [fields_of(part, config) for config in configs]
