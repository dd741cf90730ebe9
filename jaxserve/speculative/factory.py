"""The proposer that a configuration names."""

from __future__ import annotations

from jaxserve.config import ResolvedConfig
from jaxserve.speculative.ngram import NgramProposer
from jaxserve.speculative.proposer import Proposer


def create_proposer(config: ResolvedConfig) -> Proposer | None:
    """None: the engine does not speculate."""
    if config.speculative is None:
        return None
    assert config.speculative == "ngram", config.speculative  # `resolve` has checked it
    return NgramProposer()
