"""The C++ backend against the float64 reference, with NaN in every slot that no token fills; and its library."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.native import library
from pallas_kernels.paged_attention import AttentionSpec, DeviceFacts, resolve_backend
from pallas_kernels.paged_attention.backends import Backend
from tests.pallas_kernels.problems import (
    appended_to,
    decoded,
    expected,
    in_dtype,
    last_chunk,
    make_problem,
    padded_to,
    run,
    run_decode,
)

NATIVE = Backend("cpu-native")
CPU = DeviceFacts("cpu")
SPEC = AttentionSpec(9, 3, 64, 32, "float32", "float32")
LENGTHS = st.lists(
    st.tuples(st.integers(0, 150), st.sampled_from([1, 1, 1, 2, 15, 16, 17, 70])), min_size=1, max_size=11
)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size"),
    [(1, 1, 8, 1), (2, 3, 16, 16), (3, 4, 72, 7), (1, 7, 128, 100), (2, 8, 64, 32)],
)
@settings(max_examples=15)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=LENGTHS,
    window=st.sampled_from([None, None, 1, 17, 128]),
    cap=st.sampled_from([None, None, 1.5]),
    scale=st.sampled_from([None, 0.0, -0.3]),
)
def test_matches_reference(kv_heads, group, head_dim, block_size, seed, lengths, window, cap, scale) -> None:
    problem = make_problem(
        np.random.default_rng(seed),
        contexts=[context for context, _ in lengths],
        query_lens=[queries for _, queries in lengths],
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        block_size=block_size,
    )
    problem = dataclasses.replace(
        problem, sliding_window=window, soft_cap=cap, scale=problem.scale if scale is None else scale
    )
    most = -(-220 // block_size)
    out = run(padded_to(problem, tokens=11 * 70 + 6, seqs=12, width=most + 2, blocks=11 * most + 4), NATIVE)
    assert np.isfinite(out).all(), "padding rows must be finite as well"
    real = problem.cu_q_lens[problem.num_seqs]
    np.testing.assert_allclose(out[:real], expected(problem)[:real], atol=6e-6, rtol=0)


@pytest.mark.parametrize("context", [0, 31, 32, 63, 64, 127, 1000])
def test_bfloat16(context: int) -> None:
    rng = np.random.default_rng(context)
    problem = make_problem(
        rng, contexts=[context, 5], query_lens=[1, 40], heads=9, kv_heads=3, head_dim=64, block_size=32
    )
    problem = in_dtype(problem, "bfloat16")
    truth = expected(problem)
    # Sums are in float32: what is lost is the rounding of the result.
    assert np.abs(run(problem, NATIVE) - truth).max() <= 2**-8 * np.abs(truth).max()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("query_len", [1, 37])
def test_a_row_does_not_depend_on_its_batch_mates(query_len: int, window: int | None, dtype: str) -> None:
    """Bit for bit: alone, last of many, in other paddings, and in whatever order threads take the rows."""
    rng = np.random.default_rng(7)
    shape = {"heads": 9, "kv_heads": 3, "head_dim": 64, "block_size": 32}
    alone = make_problem(rng, contexts=[333], query_lens=[query_len], pad_tokens=3, **shape)
    mates = make_problem(rng, contexts=[600, 1, 90, 411], query_lens=[1, 1, 1, 50], **shape)
    alone, mates = (
        in_dtype(dataclasses.replace(problem, sliding_window=window), dtype) for problem in (alone, mates)
    )
    together, row = appended_to(mates, alone)
    first = run(alone, NATIVE)[:query_len]
    for _ in range(5):
        np.testing.assert_array_equal(run(together, NATIVE)[row : row + query_len], first)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_row_does_not_depend_on_how_it_is_computed(dtype: str) -> None:
    """Bit for bit: the last rows of a chunk, decoded instead, or in a smaller chunk."""
    shape = {"heads": 9, "kv_heads": 3, "head_dim": 64, "block_size": 16}
    whole = make_problem(np.random.default_rng(700), contexts=[663], query_lens=[37], **shape)
    whole = in_dtype(dataclasses.replace(whole, q=4 * whole.q), dtype)  # peaks that move
    rows = run(whole, NATIVE)
    for count in (1, 2, 9):
        np.testing.assert_array_equal(run(decoded(whole, count), NATIVE), rows[-count:])
    np.testing.assert_array_equal(run(last_chunk(whole, 5), NATIVE), rows[-5:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_and_nan_of_one_row(dtype: str) -> None:
    """Rows from num_seqs on and empty ones are 0; a row whose own tokens are NaN fails alone."""
    problem = make_problem(
        np.random.default_rng(3),
        contexts=[140, 300, 8, 0, 31],
        query_lens=[1] * 5,
        heads=6,
        kv_heads=2,
        head_dim=32,
        block_size=8,
        pad_seqs=3,
        pad_tokens=3,
    )
    problem = in_dtype(problem, dtype)
    out = run_decode(problem, NATIVE)
    np.testing.assert_allclose(
        out[:5], expected(problem)[:5], atol=3e-6 if dtype == "float32" else 1e-2, rtol=0
    )
    assert not out[5:].any()
    fewer = run_decode(dataclasses.replace(problem, num_seqs=2), NATIVE)
    np.testing.assert_array_equal(fewer[:2], out[:2])
    assert not fewer[2:].any(), "rows from num_seqs on are 0"
    v_cache = problem.v_cache.copy()
    v_cache[problem.block_tables[0, 0]] = np.nan
    sick = run_decode(dataclasses.replace(problem, v_cache=v_cache), NATIVE)
    assert np.isnan(sick[0]).all()
    np.testing.assert_array_equal(sick[1:5], out[1:5])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dtype": "float16", "kv_dtype": "float16"}, "float32 and bfloat16"),
        ({"kv_dtype": "int8"}, "float32 and bfloat16"),
        ({"head_dim": 20}, "multiple of 8"),
        ({"head_dim": 520}, "multiple of 8"),
        ({"num_heads": 195}, "query heads"),
    ],
)
def test_what_it_can_not_do_is_refused_and_auto_goes_on_to_xla(changes: dict[str, object], said: str) -> None:
    spec = dataclasses.replace(SPEC, **changes)  # type: ignore[arg-type]
    with pytest.raises(NotImplementedError, match=said):
        resolve_backend("cpu-native", spec=spec, device=CPU)
    assert resolve_backend("auto", spec=spec, device=CPU).name == "xla"
    with pytest.raises(NotImplementedError, match="this is a gpu"):
        resolve_backend("cpu-native", spec=SPEC, device=DeviceFacts("gpu", (9, 0), 132))


def _start(cache: Path, prelude: str = "", *, times: int = 1, **environment: str) -> subprocess.Popen[str]:
    """A process of its own that says what it chooses, and why, in words; `times` threads choose at once."""
    code = (
        "import logging; logging.basicConfig(level='INFO')\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "from pallas_kernels.native import library\n"
        "from pallas_kernels.paged_attention import *\n"
        f"spec = {SPEC!r}\n"
        f"{prelude}\n"
        "choose = lambda _: resolve_backend('auto', spec=spec, device=DeviceFacts('cpu')).name\n"
        f"print(*ThreadPoolExecutor({times}).map(choose, range({times})))"
    )
    inherited = {name: value for name, value in os.environ.items() if name != "CXX"}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **inherited,
            "XDG_CACHE_HOME": str(cache),
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYTHONUNBUFFERED": "1",
            **environment,
        },
    )


def _said(process: subprocess.Popen[str]) -> str:
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    return said


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Takes as long as it is told to, and says how often it was asked to build; the library is the one at hand."""
    library.load()
    [built] = (Path(os.environ["XDG_CACHE_HOME"]) / "jaxserve" / "native").glob("*.so")
    program = tmp_path_factory.mktemp("compiler with spaces") / "c++"
    program.write_text(
        "#!/bin/sh\n"
        'case "$*" in *--version) exec sleep ${VERSION_SECONDS:-0} ;; esac\n'
        f'echo built >> "{program}.log"; sleep ${{BUILD_SECONDS:-0}}\n'
        f'while [ "$1" != -o ]; do shift; done; exec cp "{built}" "$2"\n'
    )
    program.chmod(0o755)
    return program


@pytest.mark.parametrize("kind", ["missing", "broken", "unreadable"])
def test_without_a_compiler_that_works_it_is_xla_and_says_why(kind: str, tmp_path: Path) -> None:
    given = {"missing": str(tmp_path / "none"), "broken": "/bin/false", "unreadable": "c++ '"}
    said = _said(_start(tmp_path, CXX=given[kind]))
    assert said.endswith("xla\n")
    assert "cpu-native is not used: " in said
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.parametrize("what", ["BUILD", "VERSION"])
def test_a_compiler_that_hangs_is_given_up(what: str, tmp_path: Path, compiler: Path) -> None:
    limits = "library._TIMEOUT_SECONDS = library._VERSION_TIMEOUT_SECONDS = 1"
    said = _said(_start(tmp_path, limits, CXX=str(compiler), **{f"{what}_SECONDS": "3"}))
    assert said.endswith("xla\n")
    assert "took more than 1 s" in said
    assert not list(tmp_path.rglob("*.*"))


def test_a_folder_that_others_may_write_to_is_not_trusted(tmp_path: Path) -> None:
    folder = tmp_path / "jaxserve" / "native"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    assert "nobody else may write there" in _said(_start(tmp_path))


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs under a number that no list of users knows."""
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 2**31 - 2)
    with pytest.raises(OSError, match="Set HOME or XDG_CACHE_HOME"):
        library._folder()


def test_it_is_built_once_and_a_damaged_library_is_rebuilt(tmp_path: Path, compiler: Path) -> None:
    def choose() -> int:
        """How often it has been built: two halves, and their union."""
        assert _said(_start(tmp_path, CXX=f'env "{compiler}" -O2')).endswith("cpu-native\n")
        builds, rest = divmod(log.read_text().count("built"), 3)
        assert not rest
        return builds

    log = compiler.with_name("c++.log")
    log.write_text("")
    assert choose() == 1, "a launcher and flags are part of the command"
    assert choose() == 1
    [built] = tmp_path.rglob("*.so")
    built.write_bytes(built.read_bytes()[:1000])
    assert choose() == 2
    built.with_suffix(".sha256").write_bytes(b"\xff\x00")
    assert choose() == 3
    assert choose() == 3


def test_processes_and_threads_may_build_it_at_once(tmp_path: Path, compiler: Path) -> None:
    processes = [_start(tmp_path, times=4, CXX=str(compiler), BUILD_SECONDS="2") for _ in range(2)]
    for process in processes:
        assert _said(process).endswith("cpu-native cpu-native cpu-native cpu-native\n")
    assert len(list(tmp_path.rglob("*.*"))) == 2, "a library and its checksum, nothing else"
