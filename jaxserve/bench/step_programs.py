"""A step's programs, each to be run and timed by itself."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.builder import HostBatch
from jaxserve.batch.masks import no_masks
from jaxserve.checkpoint import Checkpoint
from jaxserve.config import ModelConfig, ResolvedConfig
from jaxserve.device.attention import choose_attention
from jaxserve.device.host_allocator import keep_freed_memory
from jaxserve.device.params import fill_params
from jaxserve.device.program_definitions import Programs, describe_programs, make_state
from jaxserve.device.programs import ProgramMaker
from jaxserve.device.step import finish_step, run_layers, serve_step, step_parts
from jaxserve.device.step_parts import StepParts
from jaxserve.progress import Progress
from pallas_kernels.paged_attention import Backend

STEP, BEGIN, LAYERS, BARE_LAYERS, END = "step", "begin", "all layers", "layers", "end"


class StepPrograms:
    """Parameters and state on the device, and the programs that work on them, compiled anew.

    Args:
      params: nested pure dict of device arrays, keyed like `WeightSpec.path`.

    Attributes:
      attention: the backend's name.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: ResolvedConfig,
        params: dict[Any, Any],
        *,
        attention: Backend,
        num_blocks: int,
    ) -> None:
        [sharding] = {array.sharding for array in jax.tree.leaves(params)}
        described = describe_programs(
            model,
            config,
            attention=attention,
            num_blocks=num_blocks,
            platform=jax.default_backend(),
            sharding=sharding,
        )
        self._programs = replace(described, by_layer=True)  # also where an engine makes one program of all
        self._maker = ProgramMaker(self._programs, None)
        self._params = fill_params(described.params, params)
        self._state = make_state(model, config, num_blocks)
        self._deterministic = config.deterministic
        self._all_allowed = cache(lambda seqs: jax.device_put(no_masks(seqs, model.vocab_size)))
        self.attention = attention.name

    def step(self, batch: HostBatch) -> Callable[[], float]:
        """The whole step of a batch, as an engine runs it; returns seconds."""
        parts = self._maker.make_parts(batch.bucket)
        return lambda: self._run_step(parts, batch)

    def variants(self, batch: HostBatch) -> dict[str, Callable[[], float]]:
        """What to run for a batch, by name; each returns seconds.

        STEP is all of it, as an engine runs it; BEGIN, LAYERS and END are its parts, each from when its inputs are
        there until its outputs are. BARE_LAYERS write keys and values, and take the queries for what attention gives.
        """
        parts = self._maker.make_parts(batch.bucket)
        bare = ProgramMaker(self._without_attention(), None).make_parts(batch.bucket)
        return {
            STEP: lambda: self._run_step(parts, batch),
            BEGIN: lambda: self._run_begin(parts, batch)[0],
            LAYERS: lambda: self._run_layers(parts, parts, batch),
            BARE_LAYERS: lambda: self._run_layers(parts, bare, batch),
            END: lambda: self._run_end(parts, batch),
        }

    def _without_attention(self) -> Programs:
        def parts(bucket: Bucket) -> StepParts:
            model = self._programs.model
            return step_parts(model, bucket, lambda q, *_, **__: q, 1, deterministic=self._deterministic)

        return replace(self._programs, parts=parts)

    def _run_step(self, parts: StepParts, batch: HostBatch) -> float:
        started = time.perf_counter()
        packed = jax.device_put(batch.packed)
        masks = partial(self._all_allowed, batch.bucket.seqs)
        self._state, output = serve_step(parts, self._params, self._state, packed, masks)
        np.asarray(output.sampled.token_ids_S)
        return time.perf_counter() - started

    def _run_begin(self, parts: StepParts, batch: HostBatch) -> tuple[float, Any]:
        last = self._state.last_token_ids_R
        return _timed(lambda: parts.begin(self._params.ends, last, jax.device_put(batch.packed)))

    def _run_layers(self, parts: StepParts, layers: StepParts, batch: HostBatch) -> float:
        _, (arrays, x_TD, shared) = self._run_begin(parts, batch)
        state = self._state
        seconds, (cache, _) = _timed(
            lambda: run_layers(layers.layers, self._params, state.kv_cache, x_TD, shared, arrays)
        )
        self._state = replace(state, kv_cache=cache)
        return seconds

    def _run_end(self, parts: StepParts, batch: HostBatch) -> float:
        _, (arrays, x_TD, _) = self._run_begin(parts, batch)
        state, masks = self._state, partial(self._all_allowed, batch.bucket.seqs)
        seconds, (sampling, last, _) = _timed(
            lambda: finish_step(parts, self._params.ends, state, x_TD, arrays, masks)
        )
        self._state = replace(state, sampling=sampling, last_token_ids_R=last)
        return seconds


def load_step_programs(
    checkpoint: Checkpoint, config: ResolvedConfig, *, num_blocks: int, progress: Progress
) -> StepPrograms:
    """A model's weights on the device that is here, and an empty pool, for steps as an engine runs them."""
    attention = choose_attention(checkpoint.config, config)
    params = checkpoint.load_params(
        jnp.dtype(config.dtype), quantization=config.quantization, progress=progress
    )
    if jax.default_backend() == "cpu":
        keep_freed_memory()  # as an engine does
    return StepPrograms(checkpoint.config, config, params, attention=attention, num_blocks=num_blocks)


def time_in_turn[Key](runs: Mapping[Key, Callable[[], float]], *, repeats: int) -> dict[Key, float]:
    """Median seconds of each, run one after the other, so many times over; a first round is a warm-up."""
    rounds = [{key: run() for key, run in runs.items()} for _ in range(repeats + 1)][1:]
    return {key: statistics.median(taken[key] for taken in rounds) for key in runs}


def _timed(run: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = jax.block_until_ready(run())
    return time.perf_counter() - started, result
