"""Digests of prefixes: equal exactly for equal tokens under one salt, in every process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.scheduler.prefix_hash import block_digests, root_digest

TOKENS = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)


def block_digest(previous: bytes, token_ids: list[int]) -> bytes:
    [digest] = block_digests(previous, token_ids, len(token_ids))
    return digest


@given(TOKENS, TOKENS)
def test_blocks_have_equal_digests_only_for_equal_tokens(a: list[int], b: list[int]) -> None:
    root = root_digest(None)
    assert (block_digest(root, a) == block_digest(root, b)) == (a == b)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=20), st.integers(1, 5))
def test_blocks_at_once_have_the_digests_of_one_after_another(token_ids: list[int], size: int) -> None:
    digests = block_digests(root_digest(None), tuple(token_ids), size)
    previous = root_digest(None)
    for start, digest in zip(range(0, len(token_ids) - size + 1, size), digests, strict=True):
        previous = block_digest(previous, token_ids[start : start + size])
        assert digest == previous


def test_boundaries_between_numbers_matter() -> None:
    root = root_digest(None)
    texts = [[1, 23], [12, 3], [123], [1, 2, 3], [0, 1], [1, 0], [1], [256], [1, 256], [65537]]
    assert len({block_digest(root, tokens) for tokens in texts}) == len(texts)


def test_a_digest_names_everything_before_it() -> None:
    root = root_digest(None)
    assert block_digest(block_digest(root, [1, 2]), [5, 6]) != block_digest(
        block_digest(root, [3, 4]), [5, 6]
    )
    assert block_digest(root, [5, 6]) != block_digest(block_digest(root, [1, 2]), [5, 6])


def test_salts_start_different_chains() -> None:
    salts = [None, "", "x", "y", "none:", "None", "salt:", "\x00", "x\x00", "x" * 100_000, "\ud800"]
    assert len({root_digest(salt) for salt in salts}) == len(salts)


@pytest.mark.parametrize("salt", [1, b"x", ["x"], True])
def test_a_salt_that_is_no_string_is_refused(salt: object) -> None:
    with pytest.raises(TypeError, match="cache_salt must be a string"):
        root_digest(salt)  # type: ignore[arg-type]


def test_digests_are_the_same_in_every_process() -> None:
    """Python's hash() differs with PYTHONHASHSEED; and hash(-1) == hash(-2)."""
    script = "from jaxserve.scheduler.prefix_hash import *; print(block_digests(root_digest('tenant'), [1, 2, 3], 3))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).resolve().parents[2],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("0", "1", "random")
    }
    assert seen == {str(block_digests(root_digest("tenant"), [1, 2, 3], 3))}
