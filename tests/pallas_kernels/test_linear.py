"""Products in C++ against float64."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.linear import cpu_native


def _operands(
    seed: int, tokens: int, ins: int, outs: int, dtype: str
) -> tuple[jnp.ndarray, jnp.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x, kernel = (jnp.asarray(rng.standard_normal(shape), dtype) for shape in ((tokens, ins), (outs, ins)))
    return x, kernel, np.asarray(x, np.float64) @ np.asarray(kernel, np.float64).T


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 19),
    ins=st.one_of(st.integers(1, 200), st.integers(2040, 4200)),
    outs=st.integers(1, 120),
    dtypes=st.sampled_from([("float32", None), ("bfloat16", None), ("bfloat16", jnp.dtype("float32"))]),
)
def test_matches_float64(seed, tokens, ins, outs, dtypes) -> None:
    dtype, out_dtype = dtypes
    x, kernel, truth = _operands(seed, tokens, ins, outs, dtype)
    y = cpu_native.project(x, kernel, out_dtype=out_dtype)
    assert y.shape == truth.shape
    assert y.dtype == (out_dtype or x.dtype)
    error = np.abs(np.asarray(y, np.float64) - truth)
    if y.dtype == jnp.bfloat16:
        assert (error <= 2**-8 * np.abs(truth) + 1e-5 * ins**0.5).all()
    else:
        assert error.max() < 1e-6 * ins


@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 19),
    ins=st.one_of(st.integers(1, 200), st.integers(2040, 4200)),
    panels=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
)
def test_panels_give_the_bits_of_the_matrix(seed, tokens, ins, panels, dtype) -> None:
    operands = [_operands(seed + i, tokens, ins, n * cpu_native.PANEL, dtype) for i, n in enumerate(panels)]
    x, kernels = operands[0][0], [kernel for _, kernel, _ in operands]
    products = cpu_native.project_panels(x, [cpu_native.to_panels(np.asarray(kernel)) for kernel in kernels])
    for y, kernel in zip(products, kernels, strict=True):
        wanted = cpu_native.project(x, kernel)
        assert y.dtype == wanted.dtype == x.dtype
        np.testing.assert_array_equal(np.asarray(y), np.asarray(wanted), strict=True)


@settings(max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    tokens=st.integers(1, 19),
    pairs=st.one_of(st.integers(1, 100), st.integers(2040, 4200)),
    panels=st.lists(st.integers(1, 8), min_size=1, max_size=3),
    dtype=st.sampled_from(["float32", "bfloat16"]),
    extreme=st.booleans(),
)
def test_int8_panels_sum_exactly(seed, tokens, pairs, panels, dtype, extreme) -> None:
    rng = np.random.default_rng(seed)

    def numbers(*shape: int) -> np.ndarray:
        return rng.choice([-128, 127], shape) if extreme else rng.integers(-128, 128, shape)

    x = jnp.asarray(
        numbers(tokens, 2 * pairs) if extreme else rng.standard_normal((tokens, 2 * pairs)), dtype
    )
    x = x.at[tokens // 2].set(0)
    scale = np.abs(np.asarray(x, np.float32)).max(axis=1, keepdims=True) / np.float32(127)
    rounded = np.rint(np.asarray(x, np.float32) / np.where(scale > 0, scale, 1)).astype(np.int64)
    kernels = [(numbers(16 * n, 2 * pairs), rng.random(16 * n, np.float32)) for n in panels]
    products = cpu_native.project_int8_panels(
        x, [(cpu_native.to_panels(jnp.asarray(kernel, jnp.int8)), scales) for kernel, scales in kernels]
    )
    for y, (kernel, scales) in zip(products, kernels, strict=True):
        wanted = (rounded @ kernel.T).astype(np.float32) * (scale * scales)
        np.testing.assert_array_equal(np.asarray(y), np.asarray(jnp.asarray(wanted, dtype)), strict=True)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_stays_with_its_token_in_int8(bad: float) -> None:
    x = jnp.ones((3, 40)).at[1, 37].set(bad)
    [y] = cpu_native.project_int8_panels(
        x, [(cpu_native.to_panels(jnp.ones((16, 40), jnp.int8)), jnp.ones(16))]
    )
    assert np.isfinite(np.asarray(y)).any(axis=1).tolist() == [True, False, True]


@pytest.mark.parametrize("shape", [(17, 8), (16, 7)])
def test_panels_hold_whole_rows(shape: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"{shape[0]} rows and {shape[1]} columns"):
        cpu_native.to_panels(jnp.zeros(shape, jnp.int8))


@pytest.mark.parametrize("ins", [579, 4099])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_does_not_depend_on_how_many_there_are(dtype: str, ins: int) -> None:
    """Bit for bit, across all tilings: few and many tokens, rows of the matrix that fill no panel."""
    x, kernel, _ = _operands(0, 300, ins, 101, dtype)
    together = np.asarray(cpu_native.project(x, kernel))
    for tokens in (1, 2, 3, 4, 5, 6, 7, 8, 13, 33, 70, 299):
        alone = np.asarray(cpu_native.project(x[-tokens:], kernel))
        np.testing.assert_array_equal(alone, together[-tokens:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nan_and_infinity_stay_with_their_token(dtype: str) -> None:
    x, kernel, truth = _operands(1, 6, 64, 48, dtype)
    x = x.at[2, 5].set(jnp.nan).at[4, 0].set(jnp.inf)
    y = np.asarray(cpu_native.project(x, kernel), np.float64)
    assert np.isnan(y[2]).all()
    assert not np.isfinite(y[4]).any()
    rows = [0, 1, 3, 5]
    np.testing.assert_allclose(y[rows], truth[rows], atol=0.2 if dtype == "bfloat16" else 1e-4, rtol=0)


def test_leading_axes_are_kept() -> None:
    x, kernel, truth = _operands(2, 12, 40, 20, "float32")
    y = cpu_native.project(x.reshape(3, 4, 40), kernel)
    np.testing.assert_allclose(y, truth.reshape(3, 4, 20), atol=1e-4)


@pytest.mark.parametrize(("x_dtype", "kernel_dtype"), [("float16", "float16"), ("float32", "bfloat16")])
def test_other_dtypes_are_refused(x_dtype: str, kernel_dtype: str) -> None:
    x, kernel = jnp.zeros((2, 8), x_dtype), jnp.zeros((3, 8), kernel_dtype)
    with pytest.raises(NotImplementedError, match="no product of"):
        cpu_native.project(x, kernel)
    with pytest.raises(NotImplementedError, match="no product of"):
        cpu_native.project_panels(x, [jnp.zeros((3, 8, cpu_native.PANEL), kernel_dtype)])


def test_int8_products_are_of_few_dtypes() -> None:
    with pytest.raises(NotImplementedError, match="no product of float16 and panels of int8"):
        cpu_native.project_int8_panels(jnp.zeros((2, 8), jnp.float16), [])
