"""Logits against those that transformers computed (tests/data/reference, made by scripts/record_reference)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.checkpoint import open_checkpoint
from scripts.reference import tiny_models
from tests.models.model_harness import REFERENCE, sequence_logits, tiny_config, tiny_params

NEAR_TIE = 1e-4  # between the two best logits: rounding alone may swap them
DEMO_TOLERANCE = 2e-3
TINY_TOLERANCE = 2e-4
FINGERPRINT = ("sampled_ids", "sampled_logits", "top_ids", "top_logits", "logsumexp", "mean", "std")

LogitsFn = Callable[[Sequence[int]], np.ndarray]


def _demo_reference() -> dict[str, dict[str, np.ndarray]]:
    prompts: dict[str, dict[str, np.ndarray]] = {}
    with np.load(REFERENCE / "smollm2.npz") as stored:
        for key in stored.files:
            name, field = key.split("/")
            prompts.setdefault(name, {})[field] = stored[key]
    return prompts


DEMO = _demo_reference()


@pytest.fixture(scope="module")
def demo_logits(demo_checkpoint_dir: Path) -> LogitsFn:
    checkpoint = open_checkpoint(demo_checkpoint_dir)
    return sequence_logits(checkpoint.config, checkpoint.load_params(jnp.float32))


@pytest.fixture(scope="module", params=sorted(DEMO))
def demo_case(
    request: pytest.FixtureRequest, demo_logits: LogitsFn
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """(what was recorded of one prompt, our logits at every position of prompt and reference continuation)"""
    reference = DEMO[request.param]
    return reference, demo_logits([*reference["prompt_ids"], *reference["greedy_ids"][:-1]])


def _largest_difference(reference: dict[str, np.ndarray], logits_TV: np.ndarray) -> float:
    rows_a_time = 128  # float64 copies of all 1,563 x 49,152 logits would take gigabytes
    starts = range(0, len(logits_TV), rows_a_time)
    return max(_largest_difference_in(reference, logits_TV, slice(i, i + rows_a_time)) for i in starts)


def _largest_difference_in(reference: dict[str, np.ndarray], logits_TV: np.ndarray, rows: slice) -> float:
    expected = {field: reference[field][rows] for field in FINGERPRINT}
    wide = logits_TV[rows].astype(np.float64)
    peak = wide.max(-1)
    ours = {
        "sampled_logits": np.take_along_axis(wide, expected["sampled_ids"].astype(np.int64), axis=-1),
        "top_logits": np.take_along_axis(wide, expected["top_ids"].astype(np.int64), axis=-1),
        "logsumexp": peak + np.log(np.exp(wide - peak[:, None]).sum(-1)),
        "mean": wide.mean(-1),
        "std": wide.std(-1),
    }
    return max(float(np.abs(ours[field] - expected[field]).max()) for field in ours)


def test_reference_spans_short_and_long_prompts() -> None:
    lengths = sorted(len(r["prompt_ids"]) for r in DEMO.values())
    assert len(lengths) >= 8
    assert (lengths[0], lengths[-1]) == (5, 1500)
    assert all(len(r["greedy_ids"]) == 64 for r in DEMO.values())


def test_demo_logits_match_at_every_position(
    demo_case: tuple[dict[str, np.ndarray], np.ndarray], record_property: Callable[[str, Any], None]
) -> None:
    reference, logits_TV = demo_case
    assert np.isfinite(logits_TV).all()
    assert len(logits_TV) == len(reference["top_ids"])
    difference = _largest_difference(reference, logits_TV)
    record_property("max_abs_logit_difference", difference)
    assert difference <= DEMO_TOLERANCE


def test_demo_greedy_tokens_match(demo_case: tuple[dict[str, np.ndarray], np.ndarray]) -> None:
    """Each reference token is our best one after the reference's tokens before it, so by induction all 64 are equal."""
    reference, logits_TV = demo_case
    ours = logits_TV[len(reference["prompt_ids"]) - 1 :].argmax(-1)
    differing = ours != reference["greedy_ids"]
    assert not (differing & (reference["greedy_margins"] > NEAR_TIE)).any()


@pytest.mark.parametrize("case", sorted(tiny_models.CASES))
def test_tiny_logits_match(case: str) -> None:
    with np.load(REFERENCE / "tiny.npz") as stored:
        expected_TV = stored[case]
    logits_TV = sequence_logits(tiny_config(case), tiny_params(case))(tiny_models.prompt(case))
    np.testing.assert_allclose(logits_TV, expected_TV, atol=TINY_TOLERANCE, rtol=0)


@pytest.mark.parametrize("case", ["group3_tied", "group4_llama3_tied_biased", "group8_yarn"])
def test_bfloat16_stays_near_float32(case: str) -> None:
    """Rounding moves a logit by a few per cent of their spread; a wrong computation moves it by the spread itself."""
    with np.load(REFERENCE / "tiny.npz") as stored:
        expected_TV = stored[case]
    narrow = sequence_logits(tiny_config(case), tiny_params(case, jnp.bfloat16), jnp.bfloat16)
    logits_TV = narrow(tiny_models.prompt(case))
    assert logits_TV.dtype == np.float32
    assert np.isfinite(logits_TV).all()
    drift = np.abs(logits_TV - expected_TV)
    assert drift.mean() < 0.05 * expected_TV.std()
    assert drift.max() < 0.4 * expected_TV.std()
