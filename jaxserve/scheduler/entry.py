"""An unfinished request as its scheduler knows it, and what a scheduler counts."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.request import Request, RequestStatus
from jaxserve.scheduler.policy import Order
from jaxserve.scheduler.waiting_queue import Key
from jaxserve.stats import zero_by_class


@dataclass(slots=True, eq=False)
class Entry:
    """An unfinished request and what only the scheduler needs to know of it.

    Attributes:
      order: what the policy said when it came.
      key: its place in every order; only a promotion changes it.
      cost: tokens that it was expected to compute in all when it came.
      waiting_since: when it was added or preempted last, seconds.
      waited: seconds that it waited before that.
      is_new: not yet in a plan since then.
      has_grammar: what it may output next depends on every token before. Derived, but
        every row of every plan asks for it.
      room: tokens that its block table holds, while it runs.
      has_new_blocks: its table has blocks that no plan has named.
      num_scored_tokens: prompt tokens whose logprobs were delivered (position 0 counts with position 1).
    """

    request: Request
    order: Order
    key: Key
    cost: float
    waiting_since: float
    has_grammar: bool
    waited: float = 0.0
    is_new: bool = False
    room: int = 0
    has_new_blocks: bool = False
    num_scored_tokens: int = 1


@dataclass(slots=True)
class Counters:
    """See `EngineStats` for the meaning of each."""

    prompt_tokens: int = 0
    cached_prompt_tokens: int = 0
    generation_tokens: int = 0
    preemptions: int = 0
    preemptions_by_class: dict[str, int] = field(default_factory=zero_by_class)
    class_preemptions: int = 0
    promotions: int = 0
    stall_cuts: int = 0
    refusals: dict[str, int] = field(default_factory=dict)
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    finished: dict[str, int] = field(default_factory=dict)


def tokens_to_compute(request: Request) -> int:
    """What a waiting sequence has to compute before its next output token: choices past the first fork the prompt."""
    forks = request.index > 0 and not request.output_token_ids
    return 1 if forks else request.num_tokens


def key_of(entry: Entry) -> Key:
    return entry.key


def check_request(request_id: str, request: Request) -> None:
    """Raises AssertionError where the counters of one that has not ended contradict each other."""
    assert request.request_id == request_id
    assert not request.is_finished, f"{request_id} has ended and is still known"
    assert 0 <= request.num_computed_tokens < request.num_tokens, (
        f"{request_id} has {request.num_computed_tokens} computed of {request.num_tokens} tokens"
    )
    known = request.num_tokens + request.num_pending_tokens
    assert request.num_pending_tokens or not request.awaits_result, f"{request_id} awaits nothing"
    assert request.num_computed_tokens <= request.num_planned_tokens <= known, (
        f"{request_id} has {request.num_computed_tokens} computed and {request.num_planned_tokens} planned of "
        f"{known} tokens"
    )
    most = max(request.max_tokens, 1)
    assert request.num_output_tokens < most, f"{request_id} is past max_tokens"
    assert 0 <= request.num_pending_tokens <= most - request.num_output_tokens, (
        f"{request_id} awaits {request.num_pending_tokens} tokens after {request.num_output_tokens} of {most}"
    )
    if request.status is RequestStatus.WAITING:
        assert request.slot is None, f"{request_id} waits and has slot {request.slot}"
        assert request.num_planned_tokens == 0, f"{request_id} waits with computed tokens"
        assert request.num_pending_tokens == 0, f"{request_id} waits with pending tokens"
