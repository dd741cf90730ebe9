"""What the scheduler decided for one step. Plain data, no jax."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from jaxserve.request import Request
from jaxserve.scheduler.step_time import StepWork, work_of


# A struct and no dataclass: there is one per running sequence and step, and it is made three times as fast.
class ScheduledRequest(msgspec.Struct, frozen=True, gc=False):
    """One request's part in a step.

    Attributes:
      request: the request; it moves on while the step runs.
      num_computed_tokens: tokens already in the cache when the step starts.
      num_scheduled_tokens: tokens computed by this step, from position `num_computed_tokens` on; drafts included.
      slot: its row of device state.
      new_block_ids: what its block table has gained since its last step; all of it where `is_new`. The table is long
        enough for `num_computed_tokens + num_scheduled_tokens`.
      samples: this step reaches the last known token, so that a new one is sampled.
      continues: its single token is the one that the step before samples, which so far only the device knows.
      is_new: first step since it was admitted or resumed: its row of device state must be loaded.
      draft_token_ids: what may follow its last known token, to be verified: only where that token alone is left to
        compute, and known.
    """

    request: Request
    num_computed_tokens: int
    num_scheduled_tokens: int
    slot: int
    new_block_ids: tuple[int, ...]
    samples: bool
    continues: bool = False
    is_new: bool = False
    draft_token_ids: tuple[int, ...] = ()

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def is_single(self) -> bool:
        """One token, if drafts are left out: a row, or some rows, of one token each."""
        return self.num_scheduled_tokens == 1 + len(self.draft_token_ids)

    @property
    def num_rows(self) -> int:
        """Rows of the batch that it takes, each of which yields logits."""
        return 1 + len(self.draft_token_ids)


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """A request that drafts are wanted for, before a step is planned.

    Attributes:
      request: it has one token to compute, which is known.
      num_tokens: most drafts that are of use; its block table, as the next plan will tell it, is long enough for them.
      slot: its row of device state.
    """

    request: Request
    num_tokens: int
    slot: int


@dataclass(frozen=True)
class SchedulerOutput:
    """One step's plan.

    Attributes:
      step_id: counts from 0.
      scheduled: requests that decode (one token, and drafts) first, then prefill chunks; never empty lists of tokens.
      swap_out: (device, host) block ids to copy to host memory, first of all: what earlier steps have left there.
      swap_in: (host, device) block ids to copy back then, before `block_copies`. No device block, nor host block, is a
        destination twice; one that is copied out may be brought in again in the same plan.
      block_copies: (source, destination) block ids to copy before the step runs (copy-on-write). One by one in this
        order, or all sources read before the first destination is written: both give the same.
      preempted: requests that lost their blocks while this plan was made.
      num_padding_tokens: tokens computed for nobody on purpose; only the static baseline asks for them.
    """

    step_id: int
    scheduled: tuple[ScheduledRequest, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    preempted: tuple[Request, ...] = field(default=())
    num_padding_tokens: int = 0
    swap_out: tuple[tuple[int, int], ...] = ()
    swap_in: tuple[tuple[int, int], ...] = ()

    @cached_property
    def work(self) -> StepWork:
        """What the step has to do."""
        return work_of(self.scheduled, self.num_padding_tokens)

    @property
    def num_scheduled_tokens(self) -> int:
        return sum(item.num_scheduled_tokens for item in self.scheduled)

    @property
    def num_draft_tokens(self) -> int:
        return sum(len(item.draft_token_ids) for item in self.scheduled)
