"""Tile sizes of the Pallas kernels: one frozen configuration for each backend and shape class, from a table.

The table is data (`tuning_table.json`), because `scripts/tune_kernels` writes it. Each row says where it came from:
"estimate" (chosen by hand), "model" (compiled for the device without one: no spills, shared memory fits), or
"measured on DEVICE, DATE".
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import jax.numpy as jnp

from pallas_kernels.paged_attention.spec import AttentionSpec, DeviceFacts

TABLE = Path(__file__).with_name("tuning_table.json")


@dataclass(frozen=True)
class TuningConfig:
    """How a Pallas backend cuts its work.

    Attributes:
      decode_block_k: context tokens a decode tile reads at a time.
      decode_stages: such reads in flight.
      decode_warps: warps of a decode program (Triton).
      split_tokens: fewest context tokens of a split (flash-decoding); a multiple of decode_block_k.
      prefill_block_q: matrix rows (query tokens x group) of a prefill tile.
      prefill_block_k: context tokens a prefill tile reads at a time.
      prefill_stages: such reads in flight.
      prefill_warps: warps of a prefill program (Triton).
      source: where the row came from, see the module's text.
    """

    decode_block_k: int
    decode_stages: int
    decode_warps: int
    split_tokens: int
    prefill_block_q: int
    prefill_block_k: int
    prefill_stages: int
    prefill_warps: int
    source: str


@dataclass(frozen=True)
class ShapeClass:
    """What tile sizes depend on.

    Attributes:
      compute_capability: "8.0", "9.0", ...; "any" for interpretation.
      head_dim: d.
      kv_bytes: bytes of one number in the cache; 4 for float32 queries, whose tiles are float32 over any cache.
    """

    compute_capability: str
    head_dim: int
    kv_bytes: int


def shape_class(spec: AttentionSpec, device: DeviceFacts) -> ShapeClass:
    """The class that a call falls into."""
    capability = device.compute_capability
    name = f"{capability[0]}.{capability[1]}" if capability else "any"
    kv_bytes = 4 if spec.dtype == "float32" else jnp.dtype(spec.kv_dtype).itemsize
    return ShapeClass(name, spec.head_dim, kv_bytes)


Table = list[tuple[str, ShapeClass, TuningConfig]]


def find_config(backend: str, shape: ShapeClass, *, table: Table | None = None) -> TuningConfig:
    """The table's row for a shape class, or the nearest: numbers of the same size, the next larger head, then the
    same compute capability before "any" before another.

    Raises:
      NotImplementedError: the backend has no row for numbers of this size or heads this large.
    """
    rows = [(key, config) for name, key, config in table or read_table() if name == backend]
    fitting = [row for row in rows if row[0].kv_bytes == shape.kv_bytes and row[0].head_dim >= shape.head_dim]
    if not fitting:
        raise NotImplementedError(
            f"{backend} has no tile sizes for head_dim {shape.head_dim} with {shape.kv_bytes}-byte numbers"
        )

    def distance(row: tuple[ShapeClass, TuningConfig]) -> tuple[int, int]:
        capabilities = (shape.compute_capability, "any", row[0].compute_capability)
        return row[0].head_dim, capabilities.index(row[0].compute_capability)

    return min(fitting, key=distance)[1]


def read_table(path: Path = TABLE) -> Table:
    """Every row as (backend, class, configuration)."""
    return [
        (row["backend"], ShapeClass(**row["shape"]), TuningConfig(**row["config"]))
        for row in json.loads(path.read_text())
    ]


def write_table(rows: Table, path: Path = TABLE) -> None:
    """Replace the table."""
    data = [
        {"backend": backend, "shape": dataclasses.asdict(shape), "config": dataclasses.asdict(config)}
        for backend, shape, config in sorted(rows, key=lambda row: (row[0], dataclasses.astuple(row[1])))
    ]
    lines = ",\n".join(json.dumps(row) for row in data)
    path.write_text(f"[\n{lines}\n]\n")
