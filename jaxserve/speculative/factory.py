"""The proposer that a configuration names."""

from __future__ import annotations

from jaxserve.config import NGRAM, ResolvedConfig
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.speculative.proposer import Proposer


def create_proposer(config: ResolvedConfig) -> Proposer | None:
    """None: the engine does not speculate."""
    if config.speculative is None:
        return None
    assert config.speculative == NGRAM, config.speculative  # others draft on the device
    return NgramProposer()
