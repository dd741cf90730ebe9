"""A tokenizer for engines that tests hold themselves, and one real server process for all who speak HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.tokenizer import Tokenizer
from tests.server_process import ServerProcess


@pytest.fixture(scope="session")
def tokenizer(demo_checkpoint_dir: Path) -> Tokenizer:
    """The demo model's."""
    from jaxserve.checkpoint import open_checkpoint

    return open_checkpoint(demo_checkpoint_dir).load_tokenizer()


@pytest.fixture(scope="session")
def api_url(tiny_checkpoint_dir: Path) -> Iterator[str]:
    """A real server, with a small random model called "tiny" and few shapes to compile."""
    flags = ("--max-num-seqs", "16", "--max-num-batched-tokens", "32", "--max-model-len", "1024")
    with ServerProcess(
        tiny_checkpoint_dir, "--served-model-name", "tiny", *flags, start_timeout_s=900
    ) as server:
        yield server.base_url
