"""Random paged-attention problems: shuffled blocks, ragged lengths, everything unused poisoned with NaN.

For the tests and for `scripts/gpu_check`, which asks a real GPU the same questions.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.paged_attention import reference
from pallas_kernels.paged_attention.api import paged_decode, ragged_paged_attention
from pallas_kernels.paged_attention.backends import Backend, resolve_backend
from pallas_kernels.paged_attention.spec import H200, AttentionSpec, DeviceFacts

_STATIC = ("scale", "backend", "sliding_window", "soft_cap")
_compiled_ragged = jax.jit(ragged_paged_attention, static_argnames=_STATIC)
_compiled_decode = jax.jit(paged_decode, static_argnames=_STATIC)
# An interpreted kernel takes far longer to compile than to run.
_UNOPTIMISED = {"xla_backend_optimization_level": 0}
_interpreted_ragged = jax.jit(ragged_paged_attention, static_argnames=_STATIC, compiler_options=_UNOPTIMISED)
_interpreted_decode = jax.jit(paged_decode, static_argnames=_STATIC, compiler_options=_UNOPTIMISED)


@dataclass(frozen=True)
class Problem:
    """Arguments of `ragged_paged_attention` as numpy arrays. Values are float32 that the dtypes hold exactly.

    Attributes:
      dtype: of the queries; kv_dtype: of the cache.
      k_scale, v_scale: for a quantised cache.
    """

    q: np.ndarray
    k_cache: np.ndarray
    v_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    cu_q_lens: np.ndarray
    num_decodes: int
    num_seqs: int
    scale: float
    dtype: str = "float32"
    kv_dtype: str = "float32"
    k_scale: np.ndarray | None = None
    v_scale: np.ndarray | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None


def make_problem(
    rng: np.random.Generator,
    *,
    contexts: list[int],
    query_lens: list[int],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    pad_tokens: int = 0,
    pad_seqs: int = 0,
    pad_blocks: int = 0,
) -> Problem:
    """`contexts` are tokens before the batch's own `query_lens`; sequences of one query come first."""
    order = sorted(range(len(contexts)), key=lambda i: query_lens[i] != 1)
    contexts = [contexts[i] for i in order]
    query_lens = [query_lens[i] for i in order]
    num_seqs = len(contexts)
    lens = [c + q for c, q in zip(contexts, query_lens, strict=True)]
    blocks = [-(-n // block_size) for n in lens]
    width = max(blocks) + pad_blocks
    num_blocks = sum(blocks) + 4
    ids = iter(rng.permutation(np.arange(1, num_blocks)))
    k_cache = np.full((num_blocks, kv_heads, block_size, head_dim), np.nan, np.float32)
    v_cache = np.full_like(k_cache, np.nan)
    tables = np.zeros((num_seqs + pad_seqs, width), np.int32)
    for s, length in enumerate(lens):
        for j in range(blocks[s]):
            block = int(next(ids))
            tables[s, j] = block
            filled = min(block_size, length - j * block_size)
            k_cache[block, :, :filled] = rng.standard_normal((kv_heads, filled, head_dim))
            v_cache[block, :, :filled] = rng.standard_normal((kv_heads, filled, head_dim))
    total = sum(query_lens)
    cu = np.concatenate([[0], np.cumsum(query_lens), np.full(pad_seqs, total)]).astype(np.int32)
    return Problem(
        q=rng.standard_normal((total + pad_tokens, heads, head_dim)).astype(np.float32),
        k_cache=k_cache,
        v_cache=v_cache,
        block_tables=tables,
        seq_lens=np.array(lens + [0] * pad_seqs, np.int32),
        cu_q_lens=cu,
        num_decodes=sum(n == 1 for n in query_lens),
        num_seqs=num_seqs,
        scale=head_dim**-0.5,
    )


def in_dtype(problem: Problem, dtype: str) -> Problem:
    """The same problem, its values rounded to `dtype`."""
    rounded = lambda x: np.asarray(jnp.asarray(x, dtype), np.float32)  # noqa: E731
    return dataclasses.replace(
        problem,
        q=rounded(problem.q),
        k_cache=rounded(problem.k_cache),
        v_cache=rounded(problem.v_cache),
        dtype=dtype,
        kv_dtype=dtype,
    )


def quantised(problem: Problem, kv_dtype: str, rng: np.random.Generator, *, per: str) -> Problem:
    """The same problem over an int8 or fp8 cache with a scale "block", "head" or "both".

    int8 knows no NaN: its unused slots hold the largest number instead, under a NaN scale where the whole block is
    unused and scales are by block.
    """
    num_blocks, kv_heads = problem.k_cache.shape[:2]
    shape = {"block": (num_blocks, 1), "head": (1, kv_heads), "both": (num_blocks, kv_heads)}[per]

    def convert(cache: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        scale = rng.uniform(0.01, 0.04, shape).astype(np.float32)
        stored = cache / scale[..., None, None]
        if kv_dtype == "int8":
            stored = np.nan_to_num(np.clip(np.round(stored), -127, 127), nan=127)
            if per != "head":
                scale[np.isnan(cache).all(axis=(1, 2, 3))] = np.nan
        stored = np.asarray(jnp.asarray(stored, kv_dtype), np.float32)
        return stored, scale

    k_cache, k_scale = convert(problem.k_cache)
    v_cache, v_scale = convert(problem.v_cache)
    return dataclasses.replace(
        problem, k_cache=k_cache, v_cache=v_cache, k_scale=k_scale, v_scale=v_scale, kv_dtype=kv_dtype
    )


def spec_of(problem: Problem) -> AttentionSpec:
    """What a backend is chosen by."""
    return AttentionSpec(
        num_heads=problem.q.shape[1],
        num_kv_heads=problem.k_cache.shape[1],
        head_dim=problem.q.shape[2],
        block_size=problem.k_cache.shape[2],
        dtype=problem.dtype,
        kv_dtype=problem.kv_dtype,
    )


def backend_for(name: str, problem: Problem, device: DeviceFacts = H200) -> Backend:
    """The backend of a name, resolved for a problem; unless told otherwise as for an H200, whose splits are finest."""
    return resolve_backend(name, spec=spec_of(problem), device=device)


def run(problem: Problem, backend: Backend) -> np.ndarray:
    """[T, H, d] of `ragged_paged_attention`, as float32."""
    attend = _interpreted_ragged if backend.interpret else _compiled_ragged
    out = attend(
        **_arrays(problem),
        cu_q_lens=problem.cu_q_lens,
        num_decodes=np.int32(problem.num_decodes),
        num_seqs=np.int32(problem.num_seqs),
        backend=backend,
    )
    assert out.dtype == problem.dtype
    return np.asarray(out, np.float32)


def run_decode(problem: Problem, backend: Backend) -> np.ndarray:
    """[S, H, d] of `paged_decode`: every sequence of the problem has one query row, T = S."""
    arguments = _arrays(problem)
    arguments["q_SHd"] = arguments.pop("q_THd")
    attend = _interpreted_decode if backend.interpret else _compiled_decode
    out = attend(**arguments, num_seqs=np.int32(problem.num_seqs), backend=backend)
    assert out.dtype == problem.dtype
    return np.asarray(out, np.float32)


def _arrays(problem: Problem) -> dict:
    return {
        "q_THd": jnp.asarray(problem.q, problem.dtype),
        "k_cache_NKbd": jnp.asarray(problem.k_cache, problem.kv_dtype),
        "v_cache_NKbd": jnp.asarray(problem.v_cache, problem.kv_dtype),
        "block_tables_SB": problem.block_tables,
        "seq_lens_S": problem.seq_lens,
        "scale": problem.scale,
        "sliding_window": problem.sliding_window,
        "soft_cap": problem.soft_cap,
        "k_scale": problem.k_scale,
        "v_scale": problem.v_scale,
    }


def expected(problem: Problem) -> np.ndarray:
    """float64 [T, H, d]."""
    return reference.ragged_paged_attention(
        problem.q,
        problem.k_cache,
        problem.v_cache,
        block_tables_SB=problem.block_tables,
        seq_lens_S=problem.seq_lens,
        cu_q_lens=problem.cu_q_lens,
        num_seqs=problem.num_seqs,
        scale=problem.scale,
        sliding_window=problem.sliding_window,
        soft_cap=problem.soft_cap,
        k_scale=problem.k_scale,
        v_scale=problem.v_scale,
    )


def padded_to(problem: Problem, *, tokens: int, seqs: int, width: int, blocks: int) -> Problem:
    """The same problem in one fixed shape, so that random lengths share one executable."""
    more = seqs - len(problem.seq_lens)
    return dataclasses.replace(
        problem,
        q=np.pad(problem.q, ((0, tokens - len(problem.q)), (0, 0), (0, 0))),
        k_cache=_more_blocks(problem.k_cache, blocks),
        v_cache=_more_blocks(problem.v_cache, blocks),
        k_scale=_more_scales(problem.k_scale, blocks),
        v_scale=_more_scales(problem.v_scale, blocks),
        block_tables=np.pad(problem.block_tables, ((0, more), (0, width - problem.block_tables.shape[1]))),
        seq_lens=np.pad(problem.seq_lens, (0, more)),
        cu_q_lens=np.pad(problem.cu_q_lens, (0, more), mode="edge"),
    )


def appended_to(mates: Problem, alone: Problem) -> tuple[Problem, int]:
    """`alone`, a single sequence, in a batch behind those of `mates`: (the batch, its first query row there).

    A quantised cache has scales by block.
    """
    count = int(alone.cu_q_lens[1])
    position = mates.num_decodes if count == 1 else mates.num_seqs
    row = int(mates.cu_q_lens[position])
    width = max(mates.block_tables.shape[1], alone.block_tables.shape[1]) + 2
    widen = lambda tables: np.pad(tables, ((0, 0), (0, width - tables.shape[1])))  # noqa: E731
    moved = widen(alone.block_tables)[0]
    moved[: -(-int(alone.seq_lens[0]) // alone.k_cache.shape[2])] += mates.k_cache.shape[0]
    cu = np.concatenate([mates.cu_q_lens[: position + 1], mates.cu_q_lens[position:] + count])
    together = dataclasses.replace(
        mates,
        q=np.insert(mates.q, [row] * count, alone.q[:count], axis=0),
        k_cache=np.concatenate([mates.k_cache, alone.k_cache]),
        v_cache=np.concatenate([mates.v_cache, alone.v_cache]),
        k_scale=_joined_scales(mates.k_scale, alone.k_scale),
        v_scale=_joined_scales(mates.v_scale, alone.v_scale),
        block_tables=np.insert(widen(mates.block_tables), position, moved, axis=0),
        seq_lens=np.insert(mates.seq_lens, position, alone.seq_lens[0]),
        cu_q_lens=cu.astype(np.int32),
        num_decodes=mates.num_decodes + (count == 1),
        num_seqs=mates.num_seqs + 1,
    )
    return together, row


def _more_blocks(cache: np.ndarray, blocks: int) -> np.ndarray:
    extra = np.full((blocks - len(cache), *cache.shape[1:]), np.nan, np.float32)
    return np.concatenate([cache, extra])


def _more_scales(scale: np.ndarray | None, blocks: int) -> np.ndarray | None:
    """Unused blocks have NaN for a scale."""
    if scale is None or len(scale) == 1:
        return scale
    return np.pad(scale, ((0, blocks - len(scale)), (0, 0)), constant_values=np.nan)


def _joined_scales(mates: np.ndarray | None, alone: np.ndarray | None) -> np.ndarray | None:
    return None if mates is None or alone is None else np.concatenate([mates, alone])
