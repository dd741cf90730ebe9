"""Which backend is chosen, what is refused, and what the tables say."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_attention import (
    H200,
    XLA,
    AttentionSpec,
    DeviceFacts,
    backend_names,
    facts_of,
    paged_decode,
    ragged_paged_attention,
    resolve_backend,
)
from pallas_kernels.paged_attention.split_k import cut_rows
from pallas_kernels.paged_attention.tuning import ShapeClass, find_config, read_table, write_table

LLAMA = AttentionSpec(32, 8, 128, 16, "bfloat16", "bfloat16")
CPU = DeviceFacts("cpu")
A100 = DeviceFacts("gpu", (8, 0), 108)
T4 = DeviceFacts("gpu", (7, 5), 40)


def chosen(name: str = "auto", device: DeviceFacts = H200, **changes) -> str:
    return resolve_backend(name, spec=dataclasses.replace(LLAMA, **changes), device=device).name


def test_auto_takes_the_fastest_that_can() -> None:
    assert chosen() == "pallas-mosaic-gpu"
    assert chosen(device=A100) == "pallas-triton"
    assert chosen(device=CPU) == "cpu-native"
    assert chosen(device=CPU, dtype="float16", kv_dtype="float16") == "xla"
    assert chosen(dtype="float32", kv_dtype="float32") == "pallas-triton"
    assert chosen(device=DeviceFacts("tpu")) == "xla"
    for kv_dtype in ("int8", "float8_e4m3fn", "float8_e5m2"):
        assert chosen(kv_dtype=kv_dtype) == "pallas-mosaic-gpu"
        assert chosen(kv_dtype=kv_dtype, head_dim=256) == "pallas-triton"
        assert chosen(kv_dtype=kv_dtype, dtype="float32") == "pallas-triton"


def test_what_can_not_run_falls_through_and_says_so(caplog) -> None:
    with caplog.at_level(logging.INFO, "pallas_kernels"):
        assert chosen(device=T4) == "xla"
    levels = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert [level for level, _ in levels] == ["WARNING", "WARNING", "INFO"]
    assert "pallas-mosaic-gpu is not used" in levels[0][1]
    assert "pallas-triton is not used" in levels[1][1]
    assert "attention backend: xla" in levels[2][1]


def test_a_backend_asked_for_by_name_is_used_or_refused() -> None:
    assert chosen("pallas-triton") == "pallas-triton"
    assert chosen("xla") == "xla"
    with pytest.raises(NotImplementedError, match="pallas-mosaic-gpu"):
        chosen("pallas-mosaic-gpu", device=A100)
    with pytest.raises(
        NotImplementedError, match=r"needs an NVIDIA GPU, this is a cpu; pallas-triton-interpret"
    ):
        chosen("pallas-triton", device=CPU)
    with pytest.raises(
        ValueError, match=r"unknown attention backend 'cuda'; choose from: auto, xla, cpu-native, pallas-"
    ):
        chosen("cuda")


@pytest.mark.parametrize("name", ["pallas-triton", "pallas-mosaic-gpu"])
def test_an_impossible_head_is_refused_before_compiling(name: str) -> None:
    with pytest.raises(NotImplementedError, match=rf"{name} supports a? ?head_dim .*256.*, not 84"):
        chosen(name, head_dim=84)


def test_interpretation_runs_anywhere_and_names_itself() -> None:
    for device in (CPU, H200):
        assert resolve_backend("pallas-interpret", spec=LLAMA, device=device).name == "pallas-mosaic-gpu"
        assert resolve_backend("pallas-triton-interpret", spec=LLAMA, device=device).interpret
    exact = dataclasses.replace(LLAMA, dtype="float32", kv_dtype="float32")
    backend = resolve_backend("pallas-interpret", spec=exact, device=CPU)
    assert (backend.name, backend.interpret) == ("pallas-triton", True)


def test_names_are_complete() -> None:
    assert set(backend_names()) == {
        "xla",
        "cpu-native",
        "pallas-triton",
        "pallas-mosaic-gpu",
        "pallas-triton-interpret",
        "pallas-mosaic-gpu-interpret",
        "pallas-interpret",
    }


def test_facts_of_this_machine() -> None:
    assert facts_of(jax.devices("cpu")[0]) == CPU


def test_facts_of_a_gpu_that_is_not_here() -> None:
    nvidia = SimpleNamespace(platform="gpu", compute_capability="9.0", core_count=132)
    amd = SimpleNamespace(platform="gpu", compute_capability="gfx942", core_count=304)
    assert facts_of(cast(jax.Device, nvidia)) == H200
    assert chosen(device=facts_of(cast(jax.Device, amd))) == "xla"


@pytest.mark.parametrize(
    ("sms", "kv_heads", "splits"), [(132, 8, 32), (132, 1, 32), (132, 32, 8), (16, 32, 2)]
)
def test_one_sequence_can_occupy_every_sm(sms: int, kv_heads: int, splits: int) -> None:
    spec = dataclasses.replace(LLAMA, num_heads=32, num_kv_heads=kv_heads)
    device = DeviceFacts("gpu", (8, 0), sms)
    assert resolve_backend("pallas-triton", spec=spec, device=device).max_splits == splits


def test_every_row_of_the_table_is_sound() -> None:
    rows = read_table()
    assert len({(backend, shape) for backend, shape, _ in rows}) == len(rows), "a class has one row"
    for _, _, config in rows:
        assert config.split_tokens % config.decode_block_k == 0
        assert config.source == "estimate" or config.source.startswith(("model", "measured on "))
        sizes = [value for value in dataclasses.astuple(config) if isinstance(value, int)]
        assert min(sizes) >= 1


def test_the_nearest_row_is_taken() -> None:
    near = find_config("pallas-triton", ShapeClass("9.0", 96, 2))
    assert near == find_config("pallas-triton", ShapeClass("9.0", 128, 2))
    with pytest.raises(NotImplementedError, match="head_dim 512"):
        find_config("pallas-triton", ShapeClass("9.0", 512, 2))


def test_a_measured_row_comes_before_one_for_any_device(tmp_path) -> None:
    rows = read_table()
    _, _, config = next(row for row in rows if row[0] == "pallas-triton" and row[1].head_dim == 128)
    measured = dataclasses.replace(config, split_tokens=2048, source="measured on X, 2026-01-01")
    path = tmp_path / "table.json"
    write_table([*rows, ("pallas-triton", ShapeClass("8.9", 128, 2), measured)], path)
    again = read_table(path)
    assert len(again) == len(rows) + 1
    assert find_config("pallas-triton", ShapeClass("8.9", 128, 2), table=again) == measured
    assert find_config("pallas-triton", ShapeClass("9.0", 128, 2), table=again) != measured


def test_misuse_is_named() -> None:
    cache = jnp.zeros((4, 2, 8, 16))
    arguments = {
        "block_tables_SB": jnp.zeros((1, 1), jnp.int32),
        "seq_lens_S": jnp.ones(1, jnp.int32),
        "num_seqs": jnp.int32(1),
        "scale": 1.0,
        "backend": XLA,
    }
    q = jnp.zeros((1, 2, 16))
    with pytest.raises(ValueError, match="does not match a cache of 2 heads of 16"):
        paged_decode(jnp.zeros((1, 3, 16)), cache, cache, **arguments)
    with pytest.raises(ValueError, match="share a float dtype"):
        paged_decode(q.astype(jnp.bfloat16), cache, cache, **arguments)
    with pytest.raises(ValueError, match="queries of float32, bfloat16, float16"):
        paged_decode(*(x.astype(jnp.float8_e4m3fn) for x in (q, cache, cache)), **arguments)
    with pytest.raises(ValueError, match=r"expected q .* equal caches"):
        paged_decode(q, cache, cache[:3], **arguments)
    with pytest.raises(ValueError, match="q and caches must not be empty"):
        paged_decode(q, cache[:, :0], cache[:, :0], **arguments)
    with pytest.raises(ValueError, match="3 query rows for 1 sequences"):
        paged_decode(jnp.zeros((3, 2, 16)), cache, cache, **arguments)
    for changed, match in (
        ({"sliding_window": 0}, "sliding_window must be at least 1"),
        ({"sliding_window": 2**31}, "fit into 32 bits"),
        ({"soft_cap": 0.0}, "soft_cap must be positive"),
        ({"soft_cap": -30.0}, "soft_cap must be positive"),
        ({"soft_cap": 1e6}, "at most 10000"),
        ({"scale": float("nan")}, "scale must be finite"),
        ({"block_tables_SB": jnp.zeros(1, jnp.int32)}, r"expected block tables \[S,B\]"),
        ({"block_tables_SB": jnp.zeros((1, 0), jnp.int32)}, "not empty"),
        ({"block_tables_SB": jnp.zeros((1, 1))}, "must be int32, got float32 and int32"),
        ({"seq_lens_S": jnp.ones((1, 1), jnp.int32)}, r"sequence lengths \[S\]"),
        ({"seq_lens_S": jnp.ones(1, jnp.int8)}, "must be int32, got int32 and int8"),
    ):
        with pytest.raises(ValueError, match=match):
            paged_decode(q, cache, cache, **arguments | changed)
    for wrong in (jnp.zeros(4, jnp.int32), jnp.zeros(2)):
        with pytest.raises(ValueError, match="cu_q_lens must be int32"):
            ragged_paged_attention(q, cache, cache, cu_q_lens=wrong, num_decodes=jnp.int32(0), **arguments)
    ones = jnp.ones((1, 2), jnp.float32)
    with pytest.raises(ValueError, match="are for a quantised cache"):
        paged_decode(q, cache, cache, k_scale=ones, **arguments)
    small = cache.astype(jnp.int8)
    with pytest.raises(ValueError, match="int8 needs v_scale"):
        paged_decode(q, small, small, k_scale=ones, **arguments)
    with pytest.raises(ValueError, match=r"v_scale must be float32, broadcastable to \[4, 2\]"):
        paged_decode(q, small, small, k_scale=ones, v_scale=jnp.ones((3, 2), jnp.float32), **arguments)


def test_splits_cover_every_tile_once() -> None:
    lens = np.r_[0:2100, 8192, 131072].astype(np.int32)
    for window in (None, 1, 100, 1024):
        cut = cut_rows(jnp.asarray(lens), block_k=64, split_tokens=256, max_splits=8, sliding_window=window)
        first, end, per_split, num = map(
            np.asarray, (cut.first_tile, cut.end_tile, cut.tiles_per_split, cut.num_splits)
        )
        assert (end == -(-lens // 64)).all()
        oldest = np.maximum(lens - window, 0) if window else 0 * lens
        assert (first == oldest // 64).all()
        assert (num <= 8).all()
        assert ((num == 0) == (lens == 0)).all()
        assert (first + num * per_split >= end).all()
        assert (first + (num - 1) * per_split < np.maximum(end, 1)).all(), "the last split is not empty"
        assert (per_split >= 4).all()
