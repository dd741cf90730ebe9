"""Attention on caches of a realistic size, made on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import AttentionSpec, Backend, paged_decode, ragged_paged_attention
from scripts.gpu.jobs import Case
from scripts.gpu.workplace import Workplace

# Drawn once and repeated: drawing tens of gigabytes would take longer than measuring. A prime, so that an offset that
# wraps around meets other numbers.
_RANDOM_BLOCKS = 1021


@dataclass(frozen=True)
class Pool:
    """A layer's cache, full of random numbers. Arrays as in `api.ragged_paged_attention`."""

    k_cache_NKbd: jax.Array
    v_cache_NKbd: jax.Array
    k_scale: jax.Array | None
    v_scale: jax.Array | None

    @property
    def num_blocks(self) -> int:
        return self.k_cache_NKbd.shape[0]

    @property
    def token_bytes(self) -> int:
        """Of one token's keys and values."""
        _, num_kv_heads, _, head_dim = self.k_cache_NKbd.shape
        return 2 * num_kv_heads * head_dim * self.k_cache_NKbd.dtype.itemsize


@dataclass(frozen=True)
class Load:
    """One call's arguments, with a block table for each of L launches: each reads other blocks, as a model's layers do.

    Attributes:
      bytes_read: keys and values that one launch must read.
      flops: what one launch must multiply and add.
    """

    q: jax.Array
    tables_LSB: jax.Array
    seq_lens_S: jax.Array
    cu_q_lens: jax.Array
    num_decodes: int
    num_seqs: int
    bytes_read: int
    flops: int


def spec_of(case: Case) -> AttentionSpec:
    return AttentionSpec(
        num_heads=case["group"] * case["kv_heads"],
        num_kv_heads=case["kv_heads"],
        head_dim=case["head_dim"],
        block_size=case["block_size"],
        dtype=case["dtype"],
        kv_dtype=case.get("kv_dtype", case["dtype"]),
    )


def pool_for(case: Case, place: Workplace) -> Pool:
    """The cache of a case (`pool_tokens` long); cases of one worker share it."""
    spec = spec_of(case)
    num_blocks = case["pool_tokens"] // spec.block_size
    return place.keep("pool", (spec, num_blocks), lambda: _make_pool(spec, num_blocks))


def _make_pool(spec: AttentionSpec, num_blocks: int) -> Pool:
    drawn = min(num_blocks, _RANDOM_BLOCKS)
    shape = (drawn, spec.num_kv_heads, spec.block_size, spec.head_dim)

    @partial(jax.jit, static_argnums=1)
    def fill(key: jax.Array, repeats: int) -> jax.Array:
        numbers = jax.random.normal(key, shape, jnp.float32)
        numbers = (numbers * 32).round() if spec.kv_dtype == "int8" else numbers
        return jnp.tile(numbers.astype(spec.kv_dtype), (repeats, 1, 1, 1))[:num_blocks]

    k, v = (fill(key, -(-num_blocks // drawn)) for key in jax.random.split(jax.random.key(0)))
    scale = jnp.full((1, spec.num_kv_heads), 1 / 32 if spec.kv_dtype == "int8" else 1.0, jnp.float32)
    scales = (scale, scale) if spec.is_quantised else (None, None)
    return Pool(k, v, *scales)


def decode_load(
    spec: AttentionSpec, pool: Pool, context_lens: Sequence[int], *, rows: int, width: int, launches: int
) -> Load:
    """One query row a sequence.

    Args:
      context_lens: tokens of each sequence, its own included.
      rows: S; those past the sequences are padding.
      width: of the block tables.
      launches: block tables to go around.
    """
    seqs = len(context_lens)
    lens = np.zeros(rows, np.int32)
    lens[:seqs] = context_lens
    return Load(
        q=_queries(spec, rows),
        tables_LSB=_tables(spec, pool, lens.tolist(), width, launches),
        seq_lens_S=jnp.asarray(lens),
        cu_q_lens=jnp.minimum(jnp.arange(rows + 1, dtype=jnp.int32), seqs),
        num_decodes=seqs,
        num_seqs=seqs,
        bytes_read=int(lens.sum()) * pool.token_bytes,
        flops=int(lens.sum()) * 4 * spec.num_heads * spec.head_dim,
    )


def prefill_load(
    spec: AttentionSpec,
    pool: Pool,
    chunk: int,
    context: int,
    *,
    tokens: int,
    rows: int,
    width: int,
    launches: int,
) -> Load:
    """As many chunks of `chunk` query rows as fill `tokens`, each behind `context` tokens; `rows` is S."""
    seqs = tokens // chunk
    lens = np.zeros(rows, np.int32)
    lens[:seqs] = context + chunk
    cu = np.minimum(np.arange(rows + 1) * chunk, seqs * chunk).astype(np.int32)
    visible = seqs * (chunk * context + chunk * (chunk + 1) // 2)
    return Load(
        q=_queries(spec, tokens),
        tables_LSB=_tables(spec, pool, lens.tolist(), width, launches),
        seq_lens_S=jnp.asarray(lens),
        cu_q_lens=jnp.asarray(cu),
        num_decodes=0,
        num_seqs=seqs,
        bytes_read=int(lens.sum()) * pool.token_bytes,
        flops=visible * 4 * spec.num_heads * spec.head_dim,
    )


def run_decode(load: Load, pool: Pool, backend: Backend) -> jax.Array:
    """A launch for each block table, each on the output of the one before it."""
    caches = (pool.k_cache_NKbd, pool.v_cache_NKbd, pool.k_scale, pool.v_scale)
    return _decode_chain(load.q, *caches, load.tables_LSB, load.seq_lens_S, np.int32(load.num_seqs), backend)


def run_prefill(load: Load, pool: Pool, backend: Backend) -> jax.Array:
    """See `run_decode`."""
    facts = (load.seq_lens_S, load.cu_q_lens, np.int32(load.num_decodes), np.int32(load.num_seqs))
    caches = (pool.k_cache_NKbd, pool.v_cache_NKbd, pool.k_scale, pool.v_scale)
    return _ragged_chain(load.q, *caches, load.tables_LSB, *facts, backend)


# Loops rather than copies of the call: each copy of a Mosaic kernel would be compiled anew, seconds at a time.


@partial(jax.jit, static_argnames="backend")
def _decode_chain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_scale: Any,
    v_scale: Any,
    tables_LSB: jax.Array,
    lens: jax.Array,
    num_seqs: jax.Array,
    backend: Backend,
) -> jax.Array:
    def launch(q: jax.Array, table_SB: jax.Array) -> tuple[jax.Array, None]:
        facts: dict[str, Any] = {"block_tables_SB": table_SB, "seq_lens_S": lens, "num_seqs": num_seqs}
        return paged_decode(
            q, k, v, scale=q.shape[-1] ** -0.5, backend=backend, k_scale=k_scale, v_scale=v_scale, **facts
        ), None

    return jax.lax.scan(launch, q, tables_LSB)[0]


@partial(jax.jit, static_argnames="backend")
def _ragged_chain(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    k_scale: Any,
    v_scale: Any,
    tables_LSB: jax.Array,
    lens: jax.Array,
    cu_q_lens: jax.Array,
    num_decodes: jax.Array,
    num_seqs: jax.Array,
    backend: Backend,
) -> jax.Array:
    facts: dict[str, Any] = {
        "seq_lens_S": lens,
        "cu_q_lens": cu_q_lens,
        "num_decodes": num_decodes,
        "num_seqs": num_seqs,
    }
    scales: dict[str, Any] = {"k_scale": k_scale, "v_scale": v_scale}

    def launch(q: jax.Array, table_SB: jax.Array) -> tuple[jax.Array, None]:
        return ragged_paged_attention(
            q, k, v, block_tables_SB=table_SB, scale=q.shape[-1] ** -0.5, backend=backend, **facts, **scales
        ), None

    return jax.lax.scan(launch, q, tables_LSB)[0]


def _queries(spec: AttentionSpec, rows: int) -> jax.Array:
    return jax.random.normal(jax.random.key(1), (rows, spec.num_heads, spec.head_dim), spec.dtype)


def _tables(spec: AttentionSpec, pool: Pool, lens: Sequence[int], width: int, launches: int) -> jax.Array:
    """[L, S, B], a table a launch, of shuffled blocks.

    No block is in two sequences of a table, nor in two tables while the pool lasts.
    """
    rng = np.random.default_rng(0)
    wanted = [-(-n // spec.block_size) for n in lens]
    ids = rng.permutation(pool.num_blocks)
    if sum(wanted) > pool.num_blocks or max(wanted) > width:
        raise ValueError(f"{sum(wanted)} blocks of {pool.num_blocks}, {max(wanted)} of a table of {width}")
    tables, taken = [], 0
    for _ in range(launches):
        if taken + sum(wanted) > len(ids):
            taken = 0
        table = np.zeros((len(lens), width), np.int32)
        for s, count in enumerate(wanted):
            table[s, :count] = ids[taken : taken + count]
            taken += count
        tables.append(table)
    return jnp.asarray(np.stack(tables))
