from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxserve.device.model_runner import ModelRunner
from jaxserve.progress import NullProgress
from tests.device.driver import make_runner


@pytest.fixture(scope="session")
def tiny_runner() -> Iterator[ModelRunner]:
    """One for all: compiling takes far longer than any test."""
    runner = make_runner()
    runner.warm_up(NullProgress())
    yield runner
    runner.close()
