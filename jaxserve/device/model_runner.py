"""The boundary to the device: owns the parameters and the device state, runs steps, reads results back."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.builder import HostBatch
from jaxserve.batch.flags import BatchFlag
from jaxserve.batch.masks import no_masks
from jaxserve.batch.ready_buckets import ReadyBuckets
from jaxserve.batch.row_table import needs_state_row
from jaxserve.config import ModelConfig, ResolvedConfig
from jaxserve.device import kv_cache
from jaxserve.device.block_swap import BlockSwap, host_tier_bytes
from jaxserve.device.compiled import CompileCounter, ExecutableSet
from jaxserve.device.draft import DraftParams
from jaxserve.device.draft_model import DraftModel
from jaxserve.device.host_allocator import release_free_memory
from jaxserve.device.host_pool import HostPool
from jaxserve.device.machine_memory import machine_memory
from jaxserve.device.memory_account import MemoryAccount, tree_bytes
from jaxserve.device.params import fill_draft_params, fill_params
from jaxserve.device.program_definitions import (
    COPY_BLOCKS,
    LOAD_ROW,
    describe_programs,
    make_hidden,
    make_state,
)
from jaxserve.device.programs import (
    DraftKey,
    FollowKey,
    ObserveKey,
    ProgramKey,
    ProgramMaker,
    essential_keys,
    program_keys,
)
from jaxserve.device.sampling import (
    ENTRY_BIAS,
    ENTRY_OUTPUT,
    ENTRY_PROMPT,
    ENTRY_STOP,
    ROW_CHUNK,
    Logprobs,
)
from jaxserve.device.step import StepOutput
from jaxserve.errors import ConfigError
from jaxserve.outputs import ModelRunnerOutput, PooledTokens, TokenLogprobs
from jaxserve.pooling import sum_hidden
from jaxserve.progress import Progress
from jaxserve.request import Request
from jaxserve.scheduler.host_tier import HostSpace
from jaxserve.scheduler.output import SchedulerOutput
from jaxserve.speculative.acceptance import num_accepted
from pallas_kernels.paged_attention import Backend

# What a process grows by on a CPU once it serves, as measured: by requests and HTTP; by each shape that is still to
# come; and by the compiler, if those have to be compiled.
_SERVING_BYTES = 10 * 10**6
_SHAPE_BYTES = 2 * 10**6
_COMPILER_BYTES = 15 * 10**6


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step that the device works on, or has done.

    Attributes:
      batch: what it was given.
      output: what it gives; reading it waits for the step.
    """

    batch: HostBatch
    output: StepOutput


class ModelRunner:
    """Runs plans. One thread at a time.

    Args:
      params: nested pure dict of device arrays, keyed like `WeightSpec.path`; it is emptied, see `fill_params`.
      attention: the backend that attention runs on.
      num_blocks: usable KV blocks (the sink comes on top).
      buckets: all shapes there will be.
      host: room for KV blocks in host memory; None is none.
      cache_directory: where compiled programs are kept between starts; None keeps none.
      maker: of the same programs, if some of them had to be made before; None makes one.
      draft: what drafts on the device, if anything does.
      draft_params: as `params`, of a draft model with weights of its own, or of an exit (`models.exit`).
      clock: seconds, for measuring transfers of blocks.
      observe_logits: for tests: given the batch and the float32 logits [S, V] of every step that is read.

    Attributes:
      buckets: the shapes that can run.

    Raises:
      ConfigError: a bucket has a single row or token, whose bits `config.deterministic` could not promise.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: ResolvedConfig,
        params: dict[Any, Any],
        *,
        attention: Backend,
        num_blocks: int,
        buckets: ShapeBuckets,
        cache_directory: Path | None,
        host: HostSpace | None = None,
        maker: ProgramMaker | None = None,
        draft: DraftModel | None = None,
        draft_params: dict[Any, Any] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        observe_logits: Callable[[HostBatch, np.ndarray], None] | None = None,
    ) -> None:
        if config.deterministic and any(min(b.tokens, b.seqs) < 2 for b in buckets.all_buckets()):
            raise ConfigError("deterministic mode needs buckets of at least 2 tokens and 2 sequences")
        if maker is None:
            [sharding] = {array.sharding for array in jax.tree.leaves(params)}
            programs = describe_programs(
                model,
                config,
                attention=attention,
                num_blocks=num_blocks,
                platform=jax.default_backend(),
                sharding=sharding,
                keep_logits=observe_logits is not None,
                draft=draft,
            )
            maker = ProgramMaker(programs, cache_directory)
        self.padding_row = config.max_num_seqs
        self.buckets = ReadyBuckets(buckets)
        self._params = fill_params(maker.programs.params, params)
        self._draft = drafting = maker.programs.draft
        self._draft_params: DraftParams | None = None
        if drafting is not None:
            self._draft_params = fill_draft_params(drafting.params, draft_params, self._params)
        self._make_hidden = functools.partial(make_hidden, maker.programs.draft_model, config)
        self._hidden = self._make_hidden()
        self._make_state = functools.partial(
            make_state, model, config, num_blocks, maker.programs.draft_model
        )
        self._state = self._make_state()
        self._observe_logits = observe_logits
        self._vocab_size = model.vocab_size
        self._all_allowed: dict[int, jax.Array] = {}  # masks for steps that need none, by S
        self._maker = maker
        self._executables: ExecutableSet[ProgramKey] = ExecutableSet(self._maker, self._on_ready)
        self._compile_counter = CompileCounter()
        self._host = host or HostSpace()
        self._swap: BlockSwap | None = None
        if self._host.num_blocks:
            block_bytes = self._host.block_bytes
            pool = HostPool(self._host.num_blocks, block_bytes, np.dtype(jnp.dtype(config.dtype)))
            self._swap = BlockSwap(pool, self._executables.__getitem__, block_bytes=block_bytes, clock=clock)

    @property
    def num_compiled(self) -> int:
        """Programs that were compiled, and not found on disk."""
        return self._maker.num_compiled

    @property
    def serving_compilations(self) -> int:
        """Programs compiled while a step ran. Anything but 0 is a bug."""
        return self._compile_counter.count

    @property
    def failure(self) -> BaseException | None:
        """What ended the building of programs in the background, if anything did."""
        return self._executables.failure

    def warm_up(self, progress: Progress, *, wait_for_all: bool = True) -> None:
        """Load or compile everything that `launch` may ever need.

        Args:
          wait_for_all: return when all of it is ready. Otherwise as soon as any step can run, if in a larger shape
            than it needs (`buckets` knows which there are); a thread of low priority makes the rest.
        """
        threads = min(4, os.cpu_count() or 1)
        buckets, programs = self.buckets.planned, self._maker.programs
        draft = programs.draft_model
        keys = program_keys(buckets, swaps=programs.swaps, draft=draft)
        first = keys if wait_for_all else essential_keys(buckets, swaps=programs.swaps, draft=draft)
        self._executables.build(first, threads=threads, progress=progress, what="Preparing shapes")
        if self._swap is not None:
            cache = self._swap.calibrate(self._state.kv_cache)
            self._state = dataclasses.replace(self._state, kv_cache=cache)
        if not wait_for_all:
            self._executables.build_in_background(keys)

    def account(self, *, temporaries: int) -> MemoryAccount:
        """What memory is for, now that it is allocated; for when all is loaded and nothing has run yet.

        Args:
          temporaries: bytes, as planned.
        """
        release_free_memory()
        state = self._state
        weights, kv_cache = tree_bytes(self._params), tree_bytes(state.kv_cache)
        if self._draft_params is not None:
            own = self._draft is not None and self._draft.what.is_own
            weights += tree_bytes(self._draft_params if own else self._draft_params.exit)
        row_state = tree_bytes((state.sampling, state.last_token_ids_R, self._hidden))
        machine = machine_memory()
        missing = self.buckets.progress.total - self.buckets.progress.ready
        process = machine.used - weights - kv_cache - row_state
        if self._swap is not None and machine.on_host:
            process -= self._swap.pool.num_bytes
        if machine.on_host:
            process += _SERVING_BYTES + missing * _SHAPE_BYTES
            process += _COMPILER_BYTES if missing and self.num_compiled else 0
        host_tier = host_tier_bytes(self._host, on_host=machine.on_host)
        return MemoryAccount(weights, kv_cache, row_state, temporaries, max(process, 0), host_tier)

    def launch(self, plan: SchedulerOutput, batch: HostBatch) -> LaunchedStep:
        """Hand a step to the device, behind those launched before, and wait for none of them.

        Whatever goes wrong in here leaves the donated state undefined, until `rebuild_state`.
        """
        with self._compile_counter:
            if self._swap is not None:
                self._swap.swap_out(self._state.kv_cache, plan.swap_out)
                cache = self._swap.swap_in(self._state.kv_cache, plan.swap_in)
                self._state = dataclasses.replace(self._state, kv_cache=cache)
            self._copy_blocks(plan.block_copies)
            for row in batch.rows:
                if row.is_new and needs_state_row(row.request):
                    self._load_row(row.request)
            step, packed = self._executables[batch.bucket], jax.device_put(batch.packed)
            self._follow(batch.bucket, packed)
            masks: Any = functools.partial(self._masks_of, batch)
            # A step in parts asks for them once its layers have been launched.
            allowed = masks if isinstance(step, functools.partial) else masks()
            self._state, output = step(self._params, self._state, packed, allowed)
            self._observe(batch.bucket, packed, output)
        # Not when they are asked for: by then the next step may be in the way.
        for array in jax.tree.leaves(_wanted(output, batch.flags)):
            array.copy_to_host_async()
        return LaunchedStep(batch, output)

    def _masks_of(self, batch: HostBatch) -> jax.Array:
        """Which tokens each row may have, on the device: uint32 [S, W]."""
        if batch.masks is not None:
            return jax.device_put(batch.masks())
        seqs = batch.bucket.seqs
        if seqs not in self._all_allowed:
            self._all_allowed[seqs] = jax.device_put(no_masks(seqs, self._vocab_size))
        return self._all_allowed[seqs]

    def can_draft(self, bucket: Bucket) -> bool:
        """Whether the programs for drafting in this shape are ready."""
        return DraftKey(bucket) in self._executables

    def draft(self, batch: HostBatch, lengths: Sequence[int]) -> np.ndarray:
        """Have the draft guess what comes after the last known token of each row, and wait for it.

        Whatever goes wrong in here leaves the donated state undefined, until `rebuild_state`.

        Args:
          batch: of rows with one token each, in a shape that `can_draft`.
          lengths: how many tokens each row wants, in the order of the batch's rows; their blocks are there.

        Returns:
          int32 [rows, most tokens of a row]; what is past a row's own length means nothing.
        """
        drafting, state, seqs = self._draft, self._state, batch.bucket.seqs
        assert drafting is not None
        lengths_S = np.zeros(seqs, np.int32)
        lengths_S[: len(lengths)] = lengths
        with self._compile_counter:
            cache, drafts_KS = self._executables[DraftKey(batch.bucket)](
                self._draft_params,
                drafting.cache_of(state),
                state.sampling,
                state.last_token_ids_R,
                self._hidden,
                jax.device_put(batch.packed),
                lengths_S,
                jax.device_put(np.zeros((drafting.what.max_tokens, seqs), np.int32)),
            )
            self._put_draft_cache(cache)
            drafts: np.ndarray = jax.device_get(drafts_KS)
        return drafts.T[: len(lengths), : lengths_S.max()]

    def is_done(self, step: LaunchedStep) -> bool:
        """Whether `read` would return at once."""
        return step.output.sampled.token_ids_S.is_ready()  # type: ignore[attr-defined]

    def read(self, step: LaunchedStep) -> ModelRunnerOutput:
        """Wait for a step, and hand its results to their requests. An error of the device comes out here."""
        with self._compile_counter:
            if self._observe_logits is not None:
                self._observe_logits(step.batch, jax.device_get(step.output.sampled.logits_SV))
            result = _read_back(step.output, step.batch)
            if self._swap is not None:
                self._swap.collect()
                result.transfers = self._swap.take_transfers()
            return result

    def rebuild_state(self) -> None:
        """Begin again with an empty device state, after a step has failed; those launched before must not be read.

        Raises whatever keeps the device from having one: it is lost then.
        """
        if self._swap is not None:
            self._swap.reset()
        _delete((self._state, self._hidden))  # first, because there may be no room for two
        self._state, self._hidden = jax.block_until_ready((self._make_state(), self._make_hidden()))

    def close(self) -> None:
        """Free all device memory."""
        self._compile_counter.close()
        self._maker.stop()
        self._executables.close()
        self._maker.close()
        _delete((self._params, self._draft_params, self._state, self._hidden, self._all_allowed))

    def _on_ready(self, key: ProgramKey) -> None:
        if isinstance(key, Bucket):
            self.buckets.mark(key)

    def _follow(self, bucket: Bucket, packed: jax.Array) -> None:
        """Bring a draft model's own cache up to what the step to come computes.

        Before it, because the step overwrites the tokens sampled last, which the batch may go on from.
        """
        drafting, state = self._draft, self._state
        if drafting is not None and drafting.what.is_own:
            follow = self._executables[FollowKey(bucket)]
            cache = drafting.cache_of(state)
            self._put_draft_cache(follow(self._draft_params, cache, state.last_token_ids_R, packed))

    def _observe(self, bucket: Bucket, packed: jax.Array, output: StepOutput) -> None:
        """Keep what an exit needs of the step just launched."""
        if self._hidden is not None:
            keep = self._executables[ObserveKey(bucket)]
            self._hidden = keep(self._hidden, packed, output.hidden_SD, output.sampled.token_ids_S)

    def _put_draft_cache(self, cache: kv_cache.KVCache) -> None:
        assert self._draft is not None
        whole = self._state.kv_cache.with_part(self._draft.first_layer, cache)
        self._state = dataclasses.replace(self._state, kv_cache=whole)

    def _copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for group in _independent_groups(pairs, kv_cache.COPY_BATCH):
            padded = np.zeros((kv_cache.COPY_BATCH, 2), np.int32)
            padded[: len(group)] = group
            cache = self._executables[COPY_BLOCKS](self._state.kv_cache, padded)
            self._state = dataclasses.replace(self._state, kv_cache=cache)

    def _load_row(self, request: Request) -> None:
        """Bring a request's row of sampling state up to its history (also after a preemption)."""
        assert request.slot is not None
        token_ids, kinds, values = _row_entries(request)
        for start in range(0, max(1, len(token_ids)), ROW_CHUNK):
            chunk = slice(start, start + ROW_CHUNK)
            count = len(token_ids[chunk])
            pad = lambda x, dtype: np.pad(np.asarray(x[chunk], dtype), (0, ROW_CHUNK - count))  # noqa: B023, E731
            sampling = self._executables[LOAD_ROW](
                self._state.sampling,
                np.int32(request.slot),
                np.int32(start == 0),
                pad(token_ids, np.int32),
                pad(kinds, np.int32),
                pad(values, np.float32),
            )
            self._state = dataclasses.replace(self._state, sampling=sampling)


def _delete(arrays: Any) -> None:
    for array in jax.tree.leaves(arrays):
        if not array.is_deleted():
            array.delete()


def _independent_groups(pairs: tuple[tuple[int, int], ...], size: int) -> Iterator[list[tuple[int, int]]]:
    """Cut the copies into groups, in order, in which no destination is also a source or is written twice."""
    group: list[tuple[int, int]] = []
    written: set[int] = set()
    for source, destination in pairs:
        touched = written | {s for s, _ in group}
        if len(group) == size or source in written or destination in touched:
            yield group
            group, written = [], set()
        group.append((source, destination))
        written.add(destination)
    if group:
        yield group


def _row_entries(request: Request) -> tuple[list[int], list[int], list[float]]:
    """What `load_row` is told about a request: (token ids, kinds, values)."""
    bias = request.params.logit_bias or {}
    prompt, stops = sorted(set(request.prompt_token_ids)), sorted(request.stop_token_ids)
    token_ids = [*prompt, *request.output_token_ids, *stops, *bias]
    kinds = (
        [ENTRY_PROMPT] * len(prompt)
        + [ENTRY_OUTPUT] * len(request.output_token_ids)
        + [ENTRY_STOP] * len(stops)
        + [ENTRY_BIAS] * len(bias)
    )
    values = [0.0] * (len(token_ids) - len(bias)) + [float(value) for value in bias.values()]
    return token_ids, kinds, values


def _wanted(output: StepOutput, flags: BatchFlag) -> tuple[Any, ...]:
    """What the host reads of a step: (token ids, finite, and logprobs, prompt logprobs, hidden states of all tokens
    and of each row's last one, or None)."""
    sampled = output.sampled
    return (
        sampled.token_ids_S,
        sampled.finite_S,
        sampled.logprobs if flags & BatchFlag.LOGPROBS else None,
        output.prompt_logprobs if flags & BatchFlag.PROMPT_LOGPROBS else None,
        output.hidden_PD if flags & BatchFlag.HIDDEN else None,
        output.hidden_SD if flags & BatchFlag.LAST_HIDDEN else None,
    )


def _read_back(output: StepOutput, batch: HostBatch) -> ModelRunnerOutput:
    """Copy a step's small results to the host and hand them to their requests."""
    wanted = jax.device_get(_wanted(output, batch.flags))
    token_S, finite_S, logprobs, prompt_logprobs, hidden_PD, hidden_SD = wanted
    tokens, finite = token_S.tolist(), finite_S.tolist()
    result = ModelRunnerOutput()
    for at, row in enumerate(batch.rows):
        request_id = row.request_id
        first = batch.first_row[at] if batch.first_row else at
        last = first + num_accepted(row.draft_token_ids, tokens[first : first + row.num_rows])
        if not all(finite[first : last + 1]):
            result.failed[request_id] = "the model produced NaN or infinite logits for this request"
            continue
        if row.samples:
            result.sampled_token_ids[request_id] = tokens[first : last + 1]
            if logprobs is not None and (num_top := row.request.params.logprobs) is not None:
                result.logprobs[request_id] = [
                    _token_logprobs(logprobs, s, tokens[s], num_top) for s in range(first, last + 1)
                ]
        if (pooling := row.request.params.pooling) is not None:
            start, count = row.num_computed_tokens, row.num_scheduled_tokens
            of_row = (
                hidden_PD[batch.first_token[at] :][:count] if pooling == "mean" else hidden_SD[first:][:1]
            )
            vector = sum_hidden(of_row)
            if not np.isfinite(vector).all():
                result.failed[request_id] = (
                    "the model produced NaN or infinite hidden states for this request"
                )
                continue
            result.pooled[request_id] = PooledTokens(start, count, vector)
        if prompt_logprobs is not None and batch.num_scored[at]:
            first, position = batch.first_token[at], row.num_computed_tokens + 1
            result.prompt_logprobs[request_id] = [
                _token_logprobs(
                    prompt_logprobs,
                    first + i,
                    row.request.prompt_token_ids[position + i],
                    row.request.params.prompt_logprobs or 0,
                )
                for i in range(batch.num_scored[at])
            ]
    return result


def _token_logprobs(logprobs: Logprobs, at: int, token_id: int, num_top: int) -> TokenLogprobs:
    ids = logprobs.top_ids_MK[at, :num_top].tolist()
    values = logprobs.top_MK[at, :num_top].tolist()
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logprobs.chosen_M[at]),
        rank=int(logprobs.rank_M[at]),
        top=tuple(zip(ids, values, strict=True)),
    )
