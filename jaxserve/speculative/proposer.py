"""What proposes drafts. Whatever it says, tokens are the target's: it decides how many come in a step, not which."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from jaxserve.scheduler.output import DraftRequest


class Proposer(Protocol):
    """Called by the engine's thread, before a step is planned.

    Attributes:
      uses_device: `propose` runs something there, and fails as a step would.
    """

    uses_device: bool

    def propose(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """For each of `wanted`, in order: token ids that may follow its last one; at most `num_tokens`, maybe none."""
        ...

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        ...
