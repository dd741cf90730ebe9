from __future__ import annotations

from pathlib import Path

from jaxserve.checkpoint import KNOWN_MODELS
from tests.cli.command import assert_refused, run_jaxserve


def test_the_list_names_every_known_model_and_whether_it_is_here(
    demo_checkpoint_dir: Path, tmp_path: Path
) -> None:
    elsewhere = run_jaxserve("pull", "--list", "--store", tmp_path / "empty")
    here = run_jaxserve("pull", "--list", "--store", demo_checkpoint_dir.parent)
    for name in KNOWN_MODELS:
        assert name in elsewhere.stdout
    assert "not here yet" in elsewhere.stdout
    assert str(demo_checkpoint_dir) in here.stdout
    assert (elsewhere.stderr, here.stderr) == ("", "")
    assert not (tmp_path / "empty").exists()


def test_a_model_that_is_here_is_not_fetched_again(demo_checkpoint_dir: Path) -> None:
    """It would fail: pip is told to look nowhere."""
    result = run_jaxserve(
        "pull", "smollm2", "--store", demo_checkpoint_dir.parent, environment={"PIP_NO_INDEX": "1"}
    )
    assert (result.returncode, result.stdout) == (0, f"{demo_checkpoint_dir}\n"), result.stderr


def test_an_unknown_name_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    assert_refused(run_jaxserve("pull", "smolm2", "--store", tmp_path / "store"), "smolm2", *KNOWN_MODELS)
    assert not (tmp_path / "store").exists()


def test_neither_name_nor_list_says_what_to_give() -> None:
    assert_refused(run_jaxserve("pull"), "--list", *KNOWN_MODELS)
