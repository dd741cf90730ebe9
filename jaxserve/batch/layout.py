"""How a batch is packed into one int32 vector, so that a step costs one transfer.

The host writes through `unpack(vector, places(bucket))` (views), the compiled step reads through the same function:
there is one description of the layout. Float fields travel as their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.batch.bucket import Bucket


@dataclass(frozen=True, slots=True)
class Field:
    """One array inside the vector; `is_float` fields hold float32 bits."""

    name: str
    shape: tuple[int, ...]
    is_float: bool = False

    @property
    def size(self) -> int:
        size = 1
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True, slots=True)
class RowSetting:
    """One of the arrays [S] that say how a row samples, the same in every step of a request."""

    name: str
    is_float: bool


ROW_SETTINGS = (
    RowSetting("seed_low", False),
    RowSetting("seed_high", False),
    RowSetting("top_k", False),
    RowSetting("temperature", True),
    RowSetting("top_p", True),
    RowSetting("min_p", True),
    RowSetting("presence_penalty", True),
    RowSetting("frequency_penalty", True),
    RowSetting("repetition_penalty", True),
)


def fields(bucket: Bucket) -> tuple[Field, ...]:
    """The arrays of a batch; meanings are in `device.forward_batch`. Those of ROW_SETTINGS lie side by side."""
    tokens, seqs, blocks = (bucket.tokens,), (bucket.seqs,), bucket.blocks
    return (
        Field("token_ids", tokens),
        Field("positions", tokens),
        Field("slot_mapping", tokens),
        Field("target_ids", tokens),
        Field("block_tables", (bucket.seqs, blocks)),
        Field("seq_lens", seqs),
        Field("cu_q_lens", (bucket.seqs + 1,)),
        Field("logits_indices", seqs),
        Field("state_rows", seqs),
        Field("sample_positions", seqs),
        Field("row_flags", seqs),
        Field("draft_indices", seqs),
        Field("draft_ids", seqs),
        *(Field(setting.name, seqs, setting.is_float) for setting in ROW_SETTINGS),
        Field("num_decodes", ()),
        Field("num_seqs", ()),
        Field("batch_flags", ()),
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a field lies in the vector."""

    field: Field
    start: int
    stop: int


def places(bucket: Bucket) -> tuple[Place, ...]:
    """All fields with their places, in order and without gaps."""
    found: list[Place] = []
    start = 0
    for field in fields(bucket):
        found.append(Place(field, start, start + field.size))
        start += field.size
    return tuple(found)


def packed_size(bucket: Bucket) -> int:
    """Length of the int32 vector."""
    return places(bucket)[-1].stop


def unpack(vector: Any, layout: tuple[Place, ...]) -> dict[str, Any]:
    """Name -> int32 array of the field's shape, from a numpy or jax vector (numpy: views)."""
    return {place.field.name: vector[place.start : place.stop].reshape(place.field.shape) for place in layout}
