"""What a scheduler knows about drafts: who may have how many, and how often they are accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from jaxserve.request import Request
from jaxserve.stats import SpeculationStats

_PRIOR = 0.5
_FADE = 0.9  # weight of a draft after one more of its request
_PRIOR_WEIGHT = 2.0  # drafts that the acceptance of all requests counts for beside those of one
_SHARE_OF_ALL = 0.05  # of the acceptance of all requests that the newest draft decides


@dataclass(slots=True)
class Proposal:
    """What a request's next tokens may be.

    Attributes:
      token_ids: drafts, whether they are verified in the end or not.
      num_tried, num_right: drafts that were compared with what came, and those that were it; older ones fade.
    """

    token_ids: tuple[int, ...] = ()
    num_tried: float = 0.0
    num_right: float = 0.0

    def count(self, is_right: bool) -> None:
        """A draft was compared with what came."""
        self.num_tried = _FADE * self.num_tried + 1.0
        self.num_right = _FADE * self.num_right + is_right


@dataclass(slots=True)
class Drafts:
    """One scheduler's.

    Attributes:
      most: drafts of a request in a step; 0: the engine does not speculate.
      stats: counts.
    """

    most: int
    stats: SpeculationStats = field(init=False)
    _proposals: dict[str, Proposal] = field(default_factory=dict)
    _acceptance: float = _PRIOR

    def __post_init__(self) -> None:
        self.stats = SpeculationStats(accepted_by_position=[0] * self.most)

    def limit(self, request: Request) -> int:
        """Most drafts that its next step has a use for: one less than the tokens it may still have."""
        asked = request.params.speculative_tokens
        most = self.most if asked is None else min(asked, self.most)
        return min(most, request.max_tokens - len(request.output_token_ids) - 1)

    def propose(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Keep what was proposed for the next step."""
        self._of(request_id).token_ids = tuple(token_ids)

    def proposed(self, request_id: str) -> Proposal | None:
        """What may be verified in the step being planned; None if there is nothing."""
        proposal = self._proposals.get(request_id)
        return proposal if proposal and proposal.token_ids else None

    def acceptance(self, proposal: Proposal) -> float:
        """Chance of a draft to be accepted when those before it are: the request's, and at first that of all."""
        right = proposal.num_right + _PRIOR_WEIGHT * self._acceptance
        return right / (proposal.num_tried + _PRIOR_WEIGHT)

    def acceptance_of(self, request_id: str) -> float:
        """The same, before anything is proposed for it."""
        return self.acceptance(self._of(request_id))

    def verified(self, request: Request, drafts: Sequence[int], sampled: Sequence[int], num_kept: int) -> int:
        """Learn from a step.

        Args:
          drafts: those it verified, maybe none.
          sampled: the target's tokens, one more than it accepted of them.
          num_kept: how many of these the output took: the others come after its end.

        Returns how many of those that it took were drafts.
        """
        proposal = self._of(request.request_id)
        # Proposals that were left out count as well: what they would have met is known now.
        for draft, token in zip(proposal.token_ids, sampled, strict=False):
            is_right = draft == token
            proposal.count(is_right)
            self._acceptance += _SHARE_OF_ALL * (is_right - self._acceptance)
            if not is_right:
                break
        proposal.token_ids = ()
        if not drafts:
            return 0
        num_accepted = min(num_kept, len(sampled) - 1)
        self.stats.count(len(drafts), num_accepted)
        request.num_draft_tokens += len(drafts)
        return num_accepted

    def drop(self, request_id: str) -> None:
        """Forget what was proposed: the request's tokens are computed again, or others are asked for."""
        if proposal := self._proposals.get(request_id):
            proposal.token_ids = ()

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self._proposals.pop(request_id, None)

    def _of(self, request_id: str) -> Proposal:
        proposal = self._proposals.get(request_id)
        if proposal is None:
            proposal = self._proposals[request_id] = Proposal()
        return proposal
