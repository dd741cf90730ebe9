"""A whole decode step of a random model of realistic size, against the bytes that it must move."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.flags import RowFlag
from jaxserve.batch.layout import packed_size, places, unpack
from jaxserve.batch.masks import no_masks
from jaxserve.config import ModelConfig, ResolvedConfig
from jaxserve.device.kv_cache import KVCache, block_bytes
from jaxserve.device.params import fill_params
from jaxserve.device.program_definitions import describe_programs
from jaxserve.device.sampling import init_state
from jaxserve.device.step import DeviceState, serve_whole_step
from scripts.gpu.jobs import Case, CheckFailedError
from scripts.gpu.measure import median_seconds
from scripts.gpu.random_model import draw_weights, model_config, resolved_config
from scripts.gpu.serving import attention_backend
from scripts.gpu.workplace import Workplace

_RANDOM_BLOCKS = 512


def time_step(case: Case, place: Workplace) -> dict[str, Any]:
    """The compiled `serve_step` of `batch` greedy rows at `context` tokens each, steps queued one behind the other.

    The floor: every weight that takes part in products once, and every row's keys and values. The report divides it by
    the copy bandwidth.
    """
    model, config = model_config(case["model"]), _config(case)
    run = place.keep(
        "step", (case["backend"], case["max_model_len"]), lambda: _Step(model, config, case, place)
    )
    return run.time(case)


class _Step:
    """The compiled step with weights, cache and sampling state on the device."""

    def __init__(self, model: ModelConfig, config: ResolvedConfig, case: Case, place: Workplace) -> None:
        self._model, self._config = model, config
        backend = attention_backend(place.backend_name(case["backend"]), model, config)
        self._backend_name = backend.name
        batch = config.max_num_seqs
        self._num_blocks = batch * config.max_blocks_per_seq
        weights = draw_weights(model, config.dtype)
        [sharding] = {array.sharding for array in jax.tree.leaves(weights)}
        programs = describe_programs(
            model,
            config,
            attention=backend,
            num_blocks=self._num_blocks,
            platform="cpu" if place.cpu else "gpu",
            sharding=sharding,
        )
        self._params = fill_params(programs.params, weights)
        self._bucket = Bucket(batch, batch, config.max_blocks_per_seq)
        self._step = jax.jit(partial(serve_whole_step, programs.parts(self._bucket)), donate_argnums=1)
        self._state = DeviceState(
            _random_cache(model, config, self._num_blocks),
            init_state(batch + 1, model.vocab_size),
            jnp.zeros(batch + 1, jnp.int32),
        )

    def time(self, case: Case) -> dict[str, Any]:
        packed = jax.device_put(_decode_batch(self._bucket, case["context"], self._config, self._model))
        masks = jax.device_put(no_masks(self._bucket.seqs, self._model.vocab_size))

        def call() -> Any:
            self._state, output = self._step(self._params, self._state, packed, masks)
            return output

        taken = median_seconds(call, jax.block_until_ready)
        if not np.asarray(call().sampled.finite_S).all():
            raise CheckFailedError("the step's logits are not finite")
        batch = self._bucket.seqs
        weights = sum(x.nbytes for x in jax.tree.leaves(self._params))
        if not self._model.tie_word_embeddings:
            # Only the rows of the batch's tokens.
            weights -= self._params.ends["embed_tokens"]["embedding"][...].nbytes
        token_bytes = block_bytes(self._model, 1, jnp.dtype(self._config.dtype))
        kv = batch * case["context"] * token_bytes
        return {
            **taken,
            "ran_on": self._backend_name,
            "weight_bytes": weights,
            "kv_bytes": kv,
            "floor_bytes": weights + kv,
            "tokens_per_s": batch / taken["seconds"],
        }


def _config(case: Case) -> ResolvedConfig:
    return resolved_config(
        model_config(case["model"]),
        dtype=case["dtype"],
        max_model_len=case["max_model_len"],
        max_num_seqs=case["batch"],
        max_num_batched_tokens=case["batch"],
        block_size=case["block_size"],
    )


def _random_cache(model: ModelConfig, config: ResolvedConfig, num_blocks: int) -> KVCache:
    """Random keys and values, the sink included; a piece is drawn and repeated."""
    drawn = min(num_blocks + 1, _RANDOM_BLOCKS)
    shape = (drawn, model.num_kv_heads, config.block_size, model.head_dim)

    @jax.jit
    def fill(key: jax.Array) -> jax.Array:
        piece = jax.random.normal(key, shape, jnp.dtype(config.dtype))
        return jnp.tile(piece, (math.ceil((num_blocks + 1) / drawn), 1, 1, 1))[: num_blocks + 1]

    keys = jax.random.split(jax.random.key(7), 2 * model.num_layers)
    arrays = tuple(fill(key) for key in keys)
    return KVCache(k=arrays[: model.num_layers], v=arrays[model.num_layers :])


def _decode_batch(bucket: Bucket, context: int, config: ResolvedConfig, model: ModelConfig) -> np.ndarray:
    """The packed vector of a step in which every row decodes its token at position `context` - 1."""
    rng = np.random.default_rng(0)
    packed = np.zeros(packed_size(bucket), np.int32)
    array = unpack(packed, places(bucket))
    rows, blocks = bucket.seqs, -(-context // config.block_size)
    tables = 1 + rng.permutation(rows * bucket.blocks)[: rows * blocks].reshape(rows, blocks)
    last = context - 1
    array["token_ids"][:] = rng.integers(0, model.vocab_size, rows)
    array["positions"][:] = last
    array["slot_mapping"][:] = (
        tables[:, last // config.block_size] * config.block_size + last % config.block_size
    )
    array["block_tables"][:, :blocks] = tables
    array["seq_lens"][:] = context
    array["cu_q_lens"][:] = np.arange(rows + 1)
    array["logits_indices"][:] = np.arange(rows)
    array["state_rows"][:] = np.arange(rows)
    array["sample_positions"][:] = context
    array["row_flags"][:] = int(RowFlag.SAMPLE)
    for name in ("temperature", "top_p", "repetition_penalty"):
        array[name].view(np.float32)[:] = 1.0
    array["num_decodes"][...] = rows
    array["num_seqs"][...] = rows
    return packed
