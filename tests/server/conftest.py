"""A tokenizer for engines that tests hold themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(demo_checkpoint_dir: Path) -> Tokenizer:
    """The demo model's."""
    from jaxserve.checkpoint import open_checkpoint

    return open_checkpoint(demo_checkpoint_dir).load_tokenizer()
