"""What is decided where options leave it open."""

from __future__ import annotations

import pytest

from jaxserve.config import EngineConfig, exit_path, resolve
from jaxserve.errors import ConfigError
from tests.engine_harness import TINY_MODEL


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("speculative", [None, "ngram", "self:1", "exit:somewhere"])
def test_overlap_is_for_accelerators_that_do_not_speculate(platform: str, speculative: str | None) -> None:
    config = resolve(EngineConfig(speculative=speculative), TINY_MODEL, platform=platform)
    assert config.overlap == (platform == "gpu" and speculative is None)
    for asked in (False, True):
        options = EngineConfig(speculative=speculative, overlap=asked)
        assert resolve(options, TINY_MODEL, platform=platform).overlap is asked


@pytest.mark.parametrize("layers", ["", "0", "3", "-1", "1.5", "²", "9" * 5000])
def test_a_draft_has_some_of_the_models_layers(layers: str) -> None:
    with pytest.raises(ConfigError, match="speculative"):
        resolve(EngineConfig(speculative=f"self:{layers}"), TINY_MODEL, platform="cpu")


def test_an_exit_has_a_path() -> None:
    assert exit_path("exit:a:b") == "a:b"
    assert exit_path("exits") is exit_path("self:3") is None
    with pytest.raises(ConfigError, match="speculative: expected exit:PATH"):
        exit_path("exit:")
