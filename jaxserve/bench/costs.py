"""Bytes and operations that attention and a decode step cannot do without: what times are judged by.

Only what has to move is counted, and once: weights, keys and values from the device's memory, results to it. What an
implementation adds (partial results of splits, activations between kernels) is not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jaxserve.config import ModelConfig, Quantization
from jaxserve.models.quantization import spec_bytes
from jaxserve.models.registry import get_family

_TABLE_ENTRY = 4  # int32 block ids
_LOGIT = 4  # float32


@dataclass(frozen=True)
class DecodeAttention:
    """One layer's attention of a decode batch, every sequence with the same context.

    Attributes:
      kv_bytes: keys and values of all contexts. q_out_bytes: queries and results. table_bytes: block tables.
      flops: of both products, two a multiplication and addition.
    """

    kv_bytes: int
    q_out_bytes: int
    table_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.kv_bytes + self.q_out_bytes + self.table_bytes


@dataclass(frozen=True)
class DecodeStep:
    """A whole decode step, every sequence with the same context.

    Attributes:
      weight_bytes: every parameter once; of an embedding that is no output head as well only the rows looked up.
      kv_read_bytes, kv_write_bytes: caches of all layers.
      logit_bytes: the logits once.
      flops: of all products, two a multiplication and addition.
    """

    weight_bytes: int
    kv_read_bytes: int
    kv_write_bytes: int
    logit_bytes: int
    flops: int

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_read_bytes + self.kv_write_bytes + self.logit_bytes


def decode_attention(
    model: ModelConfig, *, batch: int, context: int, block_size: int, itemsize: int = 2
) -> DecodeAttention:
    """`itemsize`: bytes of a number of the queries and of the cache."""
    per_position = model.num_kv_heads * model.head_dim * itemsize
    per_row = model.num_heads * model.head_dim * itemsize
    return DecodeAttention(
        kv_bytes=2 * batch * context * per_position,
        q_out_bytes=2 * batch * per_row,
        table_bytes=batch * -(-context // block_size) * _TABLE_ENTRY,
        flops=4 * batch * context * model.num_heads * model.head_dim,
    )


def prefill_flops(model: ModelConfig, *, chunk: int, context: int) -> int:
    """Operations of one layer's causal attention of `chunk` query tokens behind `context` earlier ones. Pairs that the
    mask hides are not counted."""
    visible = chunk * context + chunk * (chunk + 1) // 2
    return 4 * visible * model.num_heads * model.head_dim


def decode_step(
    model: ModelConfig,
    *,
    batch: int,
    context: int,
    itemsize: int = 2,
    quantization: Quantization | None = None,
) -> DecodeStep:
    """`context`: tokens that each sequence attends to, the new one included."""
    specs = {spec.path: spec for spec in get_family(model.architecture).weight_specs(model)}
    weight_bytes = sum(spec_bytes(spec, itemsize, quantization) for spec in specs.values())
    entries = sum(math.prod(spec.shape) for spec in specs.values() if len(spec.shape) == 2)
    if not model.tie_word_embeddings:  # of the embedding, rows are looked up
        embedding = math.prod(specs["embed_tokens", "embedding"].shape)
        weight_bytes += (batch * model.hidden_size - embedding) * itemsize
        entries -= embedding
    kv_of_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
    attention = decode_attention(model, batch=batch, context=context, block_size=1, itemsize=itemsize)
    return DecodeStep(
        weight_bytes=weight_bytes,
        kv_read_bytes=batch * context * kv_of_token,
        kv_write_bytes=batch * kv_of_token,
        logit_bytes=batch * model.vocab_size * _LOGIT,
        flops=2 * batch * entries + model.num_layers * attention.flops,
    )
