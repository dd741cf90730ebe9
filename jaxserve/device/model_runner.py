"""The boundary to the device: owns the parameters and the device state, runs steps, reads results back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import pallas_kernels
from jaxserve.batch.buckets import Bucket, ShapeBuckets
from jaxserve.batch.builder import HostBatch, needs_state_row, prompt_positions_scored
from jaxserve.batch.layout import packed_size
from jaxserve.config import ModelConfig, ResolvedConfig
from jaxserve.device import kv_cache
from jaxserve.device.compiled import CompileCounter, ExecutableSet
from jaxserve.device.executable_cache import ExecutableCache, hash_sources, make_manifest
from jaxserve.device.sampling import (
    ENTRY_BIAS,
    ENTRY_OUTPUT,
    ENTRY_PROMPT,
    ENTRY_STOP,
    ROW_CHUNK,
    Logprobs,
    init_state,
    load_row,
)
from jaxserve.device.step import DeviceState, StepOutput, serve_step
from jaxserve.errors import ConfigError
from jaxserve.models.registry import get_family
from jaxserve.outputs import ModelRunnerOutput, TokenLogprobs
from jaxserve.progress import Progress
from jaxserve.request import Request
from jaxserve.scheduler.output import SchedulerOutput
from pallas_kernels.paged_attention import Backend, ragged_paged_attention

_COPY_BLOCKS = "copy_blocks"
_LOAD_ROW = "load_row"


class ModelRunner:
    """Runs plans. One thread at a time.

    Args:
      params: nested pure dict of device arrays, keyed like `WeightSpec.path`.
      attention: the backend that attention runs on.
      num_blocks: usable KV blocks (the sink comes on top).
      cache_directory: where compiled programs are kept between starts; None keeps none.
      observe_logits: for tests: given the batch and the float32 logits [S, V] of every step.

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
        observe_logits: Callable[[HostBatch, np.ndarray], None] | None = None,
    ) -> None:
        if config.deterministic and any(min(b.tokens, b.seqs) < 2 for b in buckets.all_buckets()):
            raise ConfigError("deterministic mode needs buckets of at least 2 tokens and 2 sequences")
        dtype = jnp.dtype(config.dtype)
        build = get_family(model.architecture).build
        abstract = nnx.eval_shape(
            lambda: build(model, dtype=dtype, rngs=nnx.Rngs(0), deterministic=config.deterministic)
        )
        graphdef, state = nnx.split(abstract)
        nnx.replace_by_pure_dict(state, params)
        attention_options = {"scale": model.head_dim**-0.5, "backend": attention}
        rows_at_once = 1 if jax.default_backend() == "cpu" else config.max_num_seqs
        self.padding_row = config.max_num_seqs
        self._buckets = buckets
        self._params = state
        self._state = DeviceState(
            kv_cache=kv_cache.allocate(model, num_blocks, config.block_size, dtype),
            sampling=init_state(config.max_num_seqs + 1, model.vocab_size),
        )
        # A jit of its own, so that a step traces attention once and not once a layer.
        attend = jax.jit(partial(ragged_paged_attention, **attention_options))
        self._observe_logits = observe_logits
        keep_logits = observe_logits is not None
        self._step = partial(
            serve_step,
            graphdef,
            attend,
            rows_at_once,
            deterministic=config.deterministic,
            keep_logits=keep_logits,
        )
        self._executables: ExecutableSet[Bucket | str] = ExecutableSet(self._load_or_compile)
        self._compile_counter = CompileCounter()
        self._cache = None
        if (
            cache_directory is not None and not attention.interpret
        ):  # an interpreter's callbacks can't be stored
            # The pool's size is part of the arrays' shapes; limits that only steer the host are not.
            configs = {
                "model": model,
                "attention": attention_options,
                "rows_at_once": rows_at_once,
                "step": {"deterministic": config.deterministic, "keep_logits": keep_logits},
                "arrays": _abstract((self._params, self._state)),
            }
            self._cache = ExecutableCache(cache_directory, make_manifest(configs, _SOURCES_DIGEST))
        self.num_compiled = 0

    @property
    def serving_compilations(self) -> int:
        """Programs compiled while a step ran. Anything but 0 is a bug."""
        return self._compile_counter.count

    def warm_up(self, progress: Progress) -> None:
        """Compile everything that `run` may ever need."""
        keys: list[Bucket | str] = [*self._buckets.all_buckets(), _COPY_BLOCKS, _LOAD_ROW]
        self._executables.build(
            keys, threads=min(4, os.cpu_count() or 1), progress=progress, what="Preparing shapes"
        )

    def run(self, plan: SchedulerOutput, batch: HostBatch) -> ModelRunnerOutput:
        """Run one step and wait for its result.

        Whatever goes wrong in here leaves the donated state undefined: the engine must not be used afterwards.
        """
        with self._compile_counter:
            self._copy_blocks(plan.block_copies)
            for row in batch.rows:
                if row.is_new and needs_state_row(row.request):
                    self._load_row(row.request)
            step = self._executables[batch.bucket]
            self._state, output = step(self._params, self._state, jax.device_put(batch.packed))
            if self._observe_logits is not None:
                self._observe_logits(batch, jax.device_get(output.logits_SV))
            return _read_back(output, batch)

    def close(self) -> None:
        """Free all device memory."""
        self._compile_counter.close()
        self._executables.clear()
        for array in jax.tree.leaves((self._params, self._state)):
            if not array.is_deleted():
                array.delete()

    def _load_or_compile(self, key: Bucket | str) -> Any:
        """The program of a key for the arrays as they are (shape, dtype and sharding)."""
        function, donated, arguments, out_tree = self._program(key)
        in_tree = jax.tree.structure((arguments, {}))
        program = self._cache.load(str(key), in_tree, out_tree) if self._cache else None
        if program is None:
            program = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
            self.num_compiled += 1
            if self._cache:
                self._cache.store(str(key), program)
        return program

    def _program(self, key: Bucket | str) -> tuple[Callable[..., Any], int, tuple[Any, ...], Any]:
        """(function, donated argument, abstract arguments, structure of the result)."""
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        state = _abstract(self._state)
        if isinstance(key, Bucket):
            batch = (_abstract(self._params), state, ints(packed_size(key)))
            output = StepOutput.structure(keep_logits=self._observe_logits is not None)
            return partial(self._step, key), 1, batch, jax.tree.structure((state, output))
        if key == _COPY_BLOCKS:
            copies = (state.kv_cache, ints(kv_cache.COPY_BATCH, 2))
            return kv_cache.copy_blocks, 0, copies, jax.tree.structure(state.kv_cache)
        assert key == _LOAD_ROW
        values = jax.ShapeDtypeStruct((ROW_CHUNK,), jnp.float32)
        entries = (state.sampling, ints(), ints(), ints(ROW_CHUNK), ints(ROW_CHUNK), values)
        return load_row, 0, entries, jax.tree.structure(state.sampling)

    def _copy_blocks(self, pairs: tuple[tuple[int, int], ...]) -> None:
        for group in _independent_groups(pairs, kv_cache.COPY_BATCH):
            padded = np.zeros((kv_cache.COPY_BATCH, 2), np.int32)
            padded[: len(group)] = group
            cache = self._executables[_COPY_BLOCKS](self._state.kv_cache, padded)
            self._state = DeviceState(cache, self._state.sampling)

    def _load_row(self, request: Request) -> None:
        """Bring a request's row of sampling state up to its history (also after a preemption)."""
        assert request.slot is not None
        token_ids, kinds, values = _row_entries(request)
        for start in range(0, max(1, len(token_ids)), ROW_CHUNK):
            chunk = slice(start, start + ROW_CHUNK)
            count = len(token_ids[chunk])
            pad = lambda x, dtype: np.pad(np.asarray(x[chunk], dtype), (0, ROW_CHUNK - count))  # noqa: B023, E731
            sampling = self._executables[_LOAD_ROW](
                self._state.sampling,
                np.int32(request.slot),
                np.int32(start == 0),
                pad(token_ids, np.int32),
                pad(kinds, np.int32),
                pad(values, np.float32),
            )
            self._state = DeviceState(self._state.kv_cache, sampling)


def _traced_sources() -> list[Path]:
    """Folders and files of all code that a step traces, constants included."""
    package = Path(__file__).parents[1]
    kernels = Path(pallas_kernels.__file__).parent
    parts = ("batch", "device", "models", "config.py", "request.py")
    return [*(package / part for part in parts), kernels]


# Now, while the files are what was imported: who edits them under a running process must not mislabel its programs.
_SOURCES_DIGEST = hash_sources(_traced_sources())


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)


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


def _read_back(output: StepOutput, batch: HostBatch) -> ModelRunnerOutput:
    """Copy a step's small results to the host and hand them to their requests."""
    wants_logprobs = any(row.samples and row.request.params.logprobs is not None for row in batch.rows)
    scored = [prompt_positions_scored(row) for row in batch.rows]
    token_S, finite_S = jax.device_get((output.token_ids_S, output.finite_S))
    logprobs = jax.device_get(output.logprobs) if wants_logprobs else None
    prompt_logprobs = jax.device_get(output.prompt_logprobs) if any(scored) else None
    tokens = token_S.tolist()
    result = ModelRunnerOutput()
    for s, row in enumerate(batch.rows):
        request_id, params = row.request_id, row.request.params
        if not finite_S[s]:
            result.failed[request_id] = "the model produced NaN or infinite logits for this request"
            continue
        if row.samples:
            result.sampled_token_ids[request_id] = [tokens[s]]
            if logprobs is not None and params.logprobs is not None:
                result.logprobs[request_id] = [_token_logprobs(logprobs, s, tokens[s], params.logprobs)]
        if prompt_logprobs is not None and scored[s]:
            first, position = batch.first_token[s], row.num_computed_tokens + 1
            result.prompt_logprobs[request_id] = [
                _token_logprobs(
                    prompt_logprobs,
                    first + i,
                    row.request.prompt_token_ids[position + i],
                    params.prompt_logprobs or 0,
                )
                for i in range(scored[s])
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
