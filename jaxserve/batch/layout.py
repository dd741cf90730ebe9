"""How a batch is packed into one int32 vector, so that a step costs one transfer.

The host writes through `unpack(vector, bucket)` (views), the compiled step reads through the same function: there is
one description of the layout. Float fields travel as their bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxserve.batch.buckets import Bucket


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


def fields(bucket: Bucket) -> tuple[Field, ...]:
    """The arrays of a batch; meanings are in `device.forward_batch`."""
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
        Field("seed_low", seqs),
        Field("seed_high", seqs),
        Field("row_flags", seqs),
        Field("top_k", seqs),
        Field("temperature", seqs, is_float=True),
        Field("top_p", seqs, is_float=True),
        Field("min_p", seqs, is_float=True),
        Field("presence_penalty", seqs, is_float=True),
        Field("frequency_penalty", seqs, is_float=True),
        Field("repetition_penalty", seqs, is_float=True),
        Field("num_decodes", ()),
        Field("num_seqs", ()),
        Field("batch_flags", ()),
    )


def packed_size(bucket: Bucket) -> int:
    """Length of the int32 vector."""
    return sum(field.size for field in fields(bucket))


def unpack(vector: Any, bucket: Bucket) -> dict[str, Any]:
    """Name -> int32 array of the field's shape, from a numpy or jax vector (numpy: views)."""
    arrays: dict[str, Any] = {}
    offset = 0
    for field in fields(bucket):
        arrays[field.name] = vector[offset : offset + field.size].reshape(field.shape)
        offset += field.size
    return arrays
