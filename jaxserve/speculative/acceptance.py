"""How far a draft goes. The device finds the same for its own state, see `device.verification`."""

from __future__ import annotations

from collections.abc import Sequence


def num_accepted(draft_token_ids: Sequence[int], sampled_token_ids: Sequence[int]) -> int:
    """How many drafts stand before the first that the target would not have sampled there.

    Args:
      sampled_token_ids: of the request's rows, one more than drafts.
    """
    for count, (draft, token) in enumerate(zip(draft_token_ids, sampled_token_ids, strict=False)):
        if draft != token:
            return count
    return len(draft_token_ids)
