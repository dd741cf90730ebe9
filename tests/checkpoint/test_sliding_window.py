"""B147: attention here always spans the whole context, so a model made for less must not load."""

from __future__ import annotations

import pytest

from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.hf_config import parse_model_config
from jaxserve.errors import CheckpointError
from tests.checkpoint.tiny_files import tiny_config, write_gguf, write_huggingface


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"sliding_window": 32}, "sliding_window 32"),
        ({"sliding_window": 127, "use_sliding_window": True}, "sliding_window 127"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ({"sliding_window": "wide"}, "sliding_window"),
    ],
)
def test_a_window_stops_the_load(changes, named):
    with pytest.raises(CheckpointError, match=rf"config\.json: .*{named}") as caught:
        parse_model_config(tiny_config(**changes), where="config.json")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": None},
        {"sliding_window": 0},
        {"sliding_window": 128},
        {"sliding_window": 4096},
        {"sliding_window": 32, "use_sliding_window": False},
        {"layer_types": ["full_attention", "full_attention"]},
    ],
)
def test_a_window_that_changes_nothing_is_no_obstacle(changes):
    plain = parse_model_config(tiny_config(), where="config.json")
    assert parse_model_config(tiny_config(**changes), where="config.json") == plain


def test_in_files_of_both_kinds(tmp_path):
    write_huggingface(tmp_path / "hf", tiny_config(sliding_window=32))
    write_gguf(tmp_path / "window.gguf", metadata={"llama.attention.sliding_window": 32})
    for path in (tmp_path / "hf", tmp_path / "window.gguf"):
        with pytest.raises(CheckpointError, match="sliding_window 32"):
            open_checkpoint(path)
