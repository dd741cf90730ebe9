"""A model small enough to check by hand, behind the real scheduler's plans.

Its "KV cache" stores, per (block, offset), the token written there and a fingerprint of everything before it, taken
by reading the previous position back through the block table. So a wrong block, a stale one, a block of another
salt, a lost copy or a skipped token changes or fails the very next step. Its host memory is the same again.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from jaxserve.config import ResolvedConfig
from jaxserve.outputs import BlockTransfers, ModelRunnerOutput, TokenLogprobs
from jaxserve.request import Request, SamplingParams, ServiceClass, ServiceTargets
from jaxserve.scheduler.output import DraftRequest, ScheduledRequest, SchedulerOutput

POISON = -1


def make_config(**changes: object) -> ResolvedConfig:
    """A small configuration for scheduler tests."""
    config = ResolvedConfig(
        dtype="float32",
        max_model_len=4096,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_prefill_chunk=8,
        block_size=4,
        enable_prefix_caching=True,
        scheduler="continuous",
        max_waiting=100_000,
        seed=0,
        attention_backend="auto",
    )
    if "max_num_batched_tokens" in changes:
        changes.setdefault("max_prefill_chunk", max(1, changes["max_num_batched_tokens"] // 2))  # type: ignore[operator]
    return replace(config, **changes)  # type: ignore[arg-type]


def make_request(
    name: str,
    prompt: Iterable[int] | int,
    max_tokens: int = 4,
    *,
    index: int = 0,
    n: int = 1,
    priority: int = 0,
    client: str = "",
    service_class: ServiceClass = ServiceClass.INTERACTIVE,
    targets: ServiceTargets = ServiceTargets(),
    arrival: float = 0.0,
    salt: str | None = None,
    stop: Iterable[int] = (),
    eos: Iterable[int] = (),
    **params: object,
) -> Request:
    """One sequence; `prompt` is token ids, or how many of them (then made up from the name)."""
    if isinstance(prompt, int):
        prompt = [zlib.crc32(f"{name}/{i}".encode()) % 1000 for i in range(prompt)]
    return Request(
        request_id=f"{name}:{index}",
        group_id=name,
        index=index,
        prompt_token_ids=tuple(prompt),
        params=SamplingParams(n=n, max_tokens=max_tokens, stop_token_ids=tuple(stop), **params),  # type: ignore[arg-type]
        seed=index,
        max_tokens=max_tokens,
        stop_token_ids=frozenset([*stop, *eos]),
        priority=priority,
        client=client,
        service_class=service_class,
        targets=targets,
        arrival_time=arrival,
        cache_salt=salt,
    )


def make_group(
    name: str, prompt: Iterable[int] | int, n: int, max_tokens: int = 4, **kwargs: object
) -> list[Request]:
    """All `n` sequences of one request."""
    return [make_request(name, prompt, max_tokens, index=i, n=n, **kwargs) for i in range(n)]  # type: ignore[arg-type]


def fingerprint(previous: int, token: int) -> int:
    """Of a position: depends on every token before it."""
    return zlib.crc32(token.to_bytes(8, "little"), previous)


def root_fingerprint(salt: str | None) -> int:
    return zlib.crc32(repr(salt).encode())


def next_token(state: int, seed: int, vocab: int) -> int:
    """What the model continues with after a context with that fingerprint."""
    return zlib.crc32(f"{state}/{seed}".encode()) % vocab


def solo_tokens(request: Request, vocab: int) -> list[int]:
    """The whole output of a request, computed without any cache or scheduler."""
    state = root_fingerprint(request.cache_salt)
    for token in request.prompt_token_ids:
        state = fingerprint(state, token)
    output: list[int] = []
    while len(output) < request.max_tokens:
        token = next_token(state, request.seed, vocab)
        output.append(token)
        if token in request.stop_token_ids and len(output) >= request.params.min_tokens:
            break
        state = fingerprint(state, token)
    return output


class OracleProposer:
    """Proposes what the fake model will say, with every `wrong`-th token another one."""

    uses_device = False

    def __init__(self, vocab: int, wrong: int = 4) -> None:
        self._vocab = vocab
        self._wrong = wrong

    def propose(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        drafts = []
        for item in wanted:
            request = item.request
            whole = replace(request, stop_token_ids=frozenset(), max_tokens=request.num_output_tokens + 64)
            truth = solo_tokens(whole, self._vocab)[request.num_output_tokens :][: item.num_tokens]
            at = request.num_output_tokens
            drafts.append(
                tuple(
                    (t + 1) % self._vocab if (at + i) % self._wrong == self._wrong - 1 else t
                    for i, t in enumerate(truth)
                )
            )
        return drafts

    def forget(self, request_id: str) -> None: ...


class FakeRunner:
    """Runs plans on numpy arrays and asserts that each plan is sound.

    Attributes:
      failing: request ids whose rows fail in the next step that samples for them.
      transfers: what the next result says of transfer rates.
      num_steps, num_computed: steps run; tokens computed for requests.
      num_out, num_in: blocks moved to host memory, and back.
    """

    def __init__(self, block_size: int, num_blocks: int, vocab: int = 97, num_host_blocks: int = 0) -> None:
        self.block_size = block_size
        self.vocab = vocab
        self.failing: set[str] = set()
        self.transfers = BlockTransfers()
        self.num_steps = 0
        self.num_computed = 0
        self.num_out = 0
        self.num_in = 0
        self._host_tokens = np.full((num_host_blocks, block_size), POISON, np.int64)
        self._host_states = np.full((num_host_blocks, block_size), POISON, np.int64)
        self._tokens = np.full((num_blocks + 1, block_size), POISON, np.int64)
        self._states = np.full((num_blocks + 1, block_size), POISON, np.int64)
        self._slot_owner: dict[int, tuple[str, int]] = {}  # slot -> (request, computed tokens)
        self._tables: dict[int, list[int]] = {}  # slot -> block table
        self._last_tokens: dict[int, int] = {}  # slot -> token sampled last

    def poison(self, block_ids: Iterable[int]) -> None:
        """Overwrite blocks whose content nobody may rely on any more."""
        ids = list(block_ids)
        self._tokens[ids] = POISON
        self._states[ids] = POISON

    def poison_host(self, block_ids: Iterable[int]) -> None:
        """The same for blocks of host memory."""
        ids = list(block_ids)
        self._host_tokens[ids] = POISON
        self._host_states[ids] = POISON

    def rebuild_state(self) -> None:
        """All that the device held is lost, and what was under way to host memory."""
        self.poison(range(len(self._tokens)))
        self.poison_host(range(len(self._host_tokens)))
        self._slot_owner.clear()
        self._tables.clear()
        self._last_tokens.clear()

    def table(self, item: ScheduledRequest) -> list[int]:
        """The block table of a row, put together from what its plans have said so far."""
        return self._tables[item.slot]

    def run(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run a plan. Each once and in order, whether or not results of earlier ones have been accepted."""
        for item in plan.scheduled:
            if item.is_new:
                self._tables[item.slot] = []
                self._last_tokens.pop(item.slot, None)
            self._tables[item.slot].extend(item.new_block_ids)
        self._check_plan(plan)
        self._swap_blocks(plan)
        self._copy_blocks(plan.block_copies)
        result = ModelRunnerOutput(transfers=self.transfers)
        for item in plan.scheduled:
            self._write(item)
        for item in plan.scheduled:
            self._read_back(item, result)
        self.num_steps += 1
        self.num_computed += plan.num_scheduled_tokens
        return result

    def _check_plan(self, plan: SchedulerOutput) -> None:
        ids = [item.request_id for item in plan.scheduled]
        assert len(set(ids)) == len(ids), f"a request is in the plan twice: {ids}"
        slots = [item.request.slot for item in plan.scheduled]
        assert None not in slots, f"slots {slots}"
        assert len(set(slots)) == len(slots), f"slots {slots}"
        sizes = [not item.is_single for item in plan.scheduled]
        assert sizes == sorted(sizes), "one-token rows must come first"
        tables: dict[int, str] = {}
        written: dict[int, str] = {}
        for item in plan.scheduled:
            assert item.num_scheduled_tokens >= 1
            stop = item.num_computed_tokens + item.num_scheduled_tokens
            assert item.slot == item.request.slot
            known = item.request.num_tokens + item.request.num_pending_tokens
            assert stop - len(item.draft_token_ids) <= known
            if item.draft_token_ids:
                assert item.samples, f"{item.request_id} has drafts behind a token that is not its last"
                assert not item.continues, f"{item.request_id} has drafts behind a token that nobody knows"
            table = self.table(item)
            assert 0 not in table, "the sink block is in a table"
            assert len(table) >= -(-stop // self.block_size)
            first = item.num_computed_tokens // self.block_size
            for block_id in table[first:]:
                assert block_id not in written, (
                    f"{item.request_id} and {written[block_id]} write block {block_id}"
                )
                written[block_id] = item.request_id
            for block_id in table:
                tables.setdefault(block_id, item.request_id)
        for item in plan.scheduled:
            for block_id in self.table(item):
                writer = written.get(block_id, item.request_id)
                assert writer == item.request_id, (
                    f"{writer} writes block {block_id} that {item.request_id} reads"
                )
        for item in plan.scheduled:
            slot = item.request.slot
            assert slot is not None
            if not item.is_new:
                expected = (item.request_id, item.num_computed_tokens)
                assert self._slot_owner.get(slot) == expected, (
                    f"slot {slot} holds {self._slot_owner.get(slot)}, expected {expected}"
                )
            stop = item.num_computed_tokens + item.num_scheduled_tokens - len(item.draft_token_ids)
            self._slot_owner[slot] = (item.request_id, stop)  # and what of the drafts is accepted

    def _swap_blocks(self, plan: SchedulerOutput) -> None:
        for pairs in (plan.swap_out, plan.swap_in):
            destinations = [destination for _, destination in pairs]
            assert len(set(destinations)) == len(destinations), f"a destination twice: {pairs}"
        for device, host in plan.swap_out:
            assert device != 0, "the sink goes to host memory"
            assert POISON not in self._states[device], (
                f"block {device} goes to host memory, not fully written"
            )
            self._host_tokens[host] = self._tokens[device]
            self._host_states[host] = self._states[device]
        for host, device in plan.swap_in:
            assert device != 0, "the sink is a destination"
            assert POISON not in self._host_states[host], f"host block {host} comes in, and holds nothing"
            self._tokens[device] = self._host_tokens[host]
            self._states[device] = self._host_states[host]
        self.num_out += len(plan.swap_out)
        self.num_in += len(plan.swap_in)

    def _copy_blocks(self, copies: tuple[tuple[int, int], ...]) -> None:
        destinations = [destination for _, destination in copies]
        assert 0 not in destinations, f"block copies {copies}"
        assert len(set(destinations)) == len(destinations), f"block copies {copies}"
        gathered = self._tokens.copy()
        for source, destination in copies:
            gathered[destination] = self._tokens[source]
            # In order, as a device might do one by one; compared below with reading all sources first.
        for source, destination in copies:
            self._tokens[destination] = self._tokens[source]
            self._states[destination] = self._states[source]
        assert np.array_equal(gathered, self._tokens), f"block copies depend on their order: {copies}"

    def _place(self, item: ScheduledRequest, position: int) -> tuple[int, int]:
        return self.table(item)[position // self.block_size], position % self.block_size

    def _write(self, item: ScheduledRequest) -> None:
        start = item.num_computed_tokens
        if start == 0:
            state = root_fingerprint(item.request.cache_salt)
        else:
            state = int(self._states[self._place(item, start - 1)])
            assert state != POISON, f"{item.request_id} reads position {start - 1}, which nobody wrote"
        if item.continues:
            assert item.num_scheduled_tokens == 1
            tokens = [self._last_tokens[item.slot]]
        else:
            tokens = item.request.token_ids(start, start + item.num_scheduled_tokens)
            tokens += item.draft_token_ids
            assert len(tokens) == item.num_scheduled_tokens
        for position, token in enumerate(tokens, start):
            place = self._place(item, position)
            state = fingerprint(state, token)
            self._tokens[place] = token
            self._states[place] = state

    def _read_back(self, item: ScheduledRequest, result: ModelRunnerOutput) -> None:
        request = item.request
        stop = item.num_computed_tokens + item.num_scheduled_tokens - len(item.draft_token_ids)
        if request.params.prompt_logprobs is not None:
            scored = range(item.num_computed_tokens + 1, min(stop + 1, request.num_prompt_tokens))
            result.prompt_logprobs[item.request_id] = [
                TokenLogprobs(request.prompt_token_ids[p], -float(p), 1) for p in scored
            ]
        if not item.samples:
            return
        self._last_tokens[item.slot] = 0
        if item.request_id in self.failing:
            self.failing.discard(item.request_id)
            result.failed[item.request_id] = "logits are not finite"
            return
        context = self._tokens[self.table(item)].reshape(-1)[:stop].tolist()
        known = min(stop, request.num_tokens)
        assert stop - known <= item.continues, f"{request.request_id} has tokens that nobody can know"
        assert context[:known] == request.token_ids(0, known), (
            f"{request.request_id}'s context in the cache is wrong"
        )
        state = root_fingerprint(request.cache_salt)
        for token in context:
            state = fingerprint(state, token)
        seen = int(self._states[self._place(item, stop - 1)])
        assert seen == state, f"{request.request_id} has read another prefix or salt"
        sampled = [next_token(state, request.seed, self.vocab)]
        for position, draft in enumerate(item.draft_token_ids, stop):
            if draft != sampled[-1]:
                break
            assert self._tokens[self._place(item, position)] == draft
            state = fingerprint(state, draft)
            assert int(self._states[self._place(item, position)]) == state
            sampled.append(next_token(state, request.seed, self.vocab))
        self._slot_owner[item.slot] = (item.request_id, stop + len(sampled) - 1)
        self._last_tokens[item.slot] = sampled[-1]
        result.sampled_token_ids[item.request_id] = sampled
        if request.params.logprobs is not None:
            result.logprobs[item.request_id] = [TokenLogprobs(0, -0.5, 1) for _ in sampled]
