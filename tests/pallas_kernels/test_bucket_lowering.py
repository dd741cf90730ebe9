"""Every shape that an engine on a GPU compiles by default can be lowered for it, without one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.buckets import default_buckets
from jaxserve.config import EngineConfig, ModelConfig, resolve
from pallas_kernels.paged_attention import H200, AttentionSpec, ragged_paged_attention, resolve_backend

MODEL = ModelConfig("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64, 8192)
CONFIG = resolve(EngineConfig(dtype="bfloat16"), MODEL, platform="gpu")
BUCKETS = default_buckets(CONFIG).all_buckets()


def corners(buckets: list[Bucket]) -> list[Bucket]:
    """The extremes of tokens, of rows, and of the two against each other (a Mosaic kernel takes seconds to lower)."""
    measures = (lambda b: (b.tokens, b.seqs), lambda b: (b.seqs, b.tokens), lambda b: b.tokens / b.seqs)
    return sorted({end(buckets, key=key) for key in measures for end in (min, max)}, key=str)


def test_the_corners_are_there() -> None:
    assert len(BUCKETS) > 20
    assert {bucket.tokens for bucket in corners(BUCKETS)} >= {2, CONFIG.max_num_batched_tokens}
    assert {bucket.seqs for bucket in corners(BUCKETS)} >= {2, CONFIG.max_num_seqs}


@pytest.mark.parametrize("bucket", BUCKETS, ids=str)
def test_triton(bucket: Bucket) -> None:
    lower("pallas-triton", bucket)


@pytest.mark.parametrize("bucket", corners(BUCKETS), ids=str)
def test_mosaic(bucket: Bucket) -> None:
    lower("pallas-mosaic-gpu", bucket)


def lower(name: str, bucket: Bucket) -> None:
    spec = AttentionSpec(
        MODEL.num_heads, MODEL.num_kv_heads, MODEL.head_dim, CONFIG.block_size, CONFIG.dtype, CONFIG.dtype
    )
    backend = resolve_backend(name, spec=spec, device=H200)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    q = jax.ShapeDtypeStruct((bucket.tokens, MODEL.num_heads, MODEL.head_dim), CONFIG.dtype)
    cache = jax.ShapeDtypeStruct((1000, MODEL.num_kv_heads, CONFIG.block_size, MODEL.head_dim), CONFIG.dtype)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, **batch: jax.Array) -> jax.Array:
        return ragged_paged_attention(q, k, v, scale=0.125, backend=backend, **batch)

    # Triton's lowering asks the mesh for the device's name.
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=H200.num_sms, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        traced = jax.jit(call).trace(
            q,
            cache,
            cache,
            block_tables_SB=ints(bucket.seqs, CONFIG.max_blocks_per_seq),
            seq_lens_S=ints(bucket.seqs),
            cu_q_lens=ints(bucket.seqs + 1),
            num_decodes=ints(),
            num_seqs=ints(),
        )
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "custom_call" in text
    assert f"tensor<{bucket.tokens}x{MODEL.num_heads}x{MODEL.head_dim}x" in text
