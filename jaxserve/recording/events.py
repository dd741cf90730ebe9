"""The lines of a recording: what came to an engine, and what it did, in order.

JSON lines. A header describes the engine; then every event has a number, the values that the engine's clock gave during
it, and the shapes whose programs had become ready since the one before. Nothing else decides what an engine does.
"""

from __future__ import annotations

from typing import Any

import msgspec

from jaxserve.batch.bucket import Bucket
from jaxserve.outputs import BlockTransfers, ModelRunnerOutput, TokenLogprobs
from jaxserve.recording.engine_description import EngineDescription
from jaxserve.request import GenerationRequest
from jaxserve.scheduler.output import ScheduledRequest, SchedulerOutput

VERSION = 2
KEY = "jaxserve_recording"

Pairs = tuple[tuple[int, int], ...]


class Header(msgspec.Struct, frozen=True):
    """The first line.

    Attributes:
      model: what the engine was made of, as it was asked for.
      options: `EngineConfig`, as JSON values.
    """

    jaxserve_recording: int
    engine: EngineDescription
    model: str
    options: dict[str, Any]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One sequence's part in a step; see `ScheduledRequest`.

    Attributes:
      seed: its resolved seed, in the first step after its admission.
      draft_token_ids: what the step verifies.
    """

    request_id: str
    start: int
    count: int
    slot: int
    new_block_ids: tuple[int, ...]
    samples: bool
    continues: bool
    seed: int | None = None
    draft_token_ids: tuple[int, ...] = ()


class Plan(msgspec.Struct, frozen=True, omit_defaults=True):
    """A step as planned; see `SchedulerOutput`.

    Attributes:
      bucket: (tokens, sequences) of the shape it ran in.
    """

    step_id: int
    bucket: tuple[int, int]
    rows: tuple[Row, ...]
    swap_out: Pairs = ()
    swap_in: Pairs = ()
    block_copies: Pairs = ()
    preempted: tuple[str, ...] = ()
    num_padding_tokens: int = 0


# (token id, its logprob, its rank, the most likely tokens with theirs)
Logprob = tuple[int, float, int, tuple[tuple[int, float], ...]]


class Result(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was read of a step: sampled tokens, their logprobs and the prompt's where they are wanted, and failures, by
    sequence; how long moving blocks took, as measured."""

    tokens: dict[str, list[int]]
    logprobs: dict[str, list[Logprob]] = {}
    prompt_logprobs: dict[str, list[Logprob]] = {}
    failed: dict[str, str] = {}
    transfers: BlockTransfers = BlockTransfers()


class Event(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True, tag_field="event"):
    """What all events have.

    Attributes:
      number: counts from 0.
      clock: seconds, in the order in which the engine asked.
      ready: (tokens, sequences) of shapes that can be used from here on.
    """

    number: int
    clock: tuple[float, ...] = ()
    ready: Pairs = ()


class Submit(Event, frozen=True, omit_defaults=True, kw_only=True, tag="submit"):
    """A request. `refused`: the error that it met, by type (and reason)."""

    request: GenerationRequest
    refused: str | None = None


class Abort(Event, frozen=True, omit_defaults=True, kw_only=True, tag="abort"):
    request_id: str


class Step(Event, frozen=True, omit_defaults=True, kw_only=True, tag="step"):
    """A call of `EngineCore.step`.

    Attributes:
      done: whether the device had done its step, each time that the engine asked.
      plan: of the step it launched. result: of the step it read, which with overlap is the one before.
      fault: where the device failed ("draft", "launch", "is_done", "read"), and how.
      raised: the error that ended the call, and the engine with it.
    """

    done: tuple[bool, ...] = ()
    plan: Plan | None = None
    result: Result | None = None
    fault: tuple[str, str] | None = None
    raised: str | None = None


class TurnedAway(Event, frozen=True, omit_defaults=True, kw_only=True, tag="turned_away"):
    """A request that the quick check, which runs beside steps, has refused; the engine has not changed by it.

    Attributes:
      at: seconds, of the engine's clock. refused: as that of `Submit`.
    """

    request: GenerationRequest
    at: float
    refused: str


class End(Event, frozen=True, omit_defaults=True, kw_only=True, tag="end"):
    """The engine was closed. A recording without this line is of one that was killed, or went beyond its size."""


AnyEvent = Submit | Abort | Step | TurnedAway | End


def plan_record(plan: SchedulerOutput, bucket: Bucket) -> Plan:
    """A plan as it is recorded."""
    return Plan(
        plan.step_id,
        (bucket.tokens, bucket.seqs),
        tuple(map(_row, plan.scheduled)),
        plan.swap_out,
        plan.swap_in,
        plan.block_copies,
        tuple(request.request_id for request in plan.preempted),
        plan.num_padding_tokens,
    )


def result_record(result: ModelRunnerOutput) -> Result:
    """A step's result as it is recorded."""
    return Result(
        result.sampled_token_ids,
        _numbers(result.logprobs),
        _numbers(result.prompt_logprobs),
        result.failed,
        result.transfers,
    )


def _numbers(logprobs: dict[str, list[TokenLogprobs]]) -> dict[str, list[Logprob]]:
    return {
        request_id: [(entry.token_id, entry.logprob, entry.rank, entry.top) for entry in entries]
        for request_id, entries in logprobs.items()
    }


def refusal(error: Exception) -> str:
    """How a request was refused, in a word."""
    reason = getattr(error, "reason", None)
    return type(error).__name__ + (f": {reason}" if reason else "")


def _row(item: ScheduledRequest) -> Row:
    return Row(
        item.request_id,
        item.num_computed_tokens,
        item.num_scheduled_tokens,
        item.slot,
        item.new_block_ids,
        item.samples,
        item.continues,
        item.request.seed if item.is_new else None,
        item.draft_token_ids,
    )
