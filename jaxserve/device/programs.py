"""What the programs of an engine are, and how one is made: loaded from disk, or traced, lowered and compiled.

Everything here works on shapes alone, so that programs can be made before, or without, any weights.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from jaxserve.batch.buckets import Bucket, ShapeBuckets
from jaxserve.batch.layout import packed_size
from jaxserve.config import ModelConfig, ResolvedConfig
from jaxserve.device import kv_cache
from jaxserve.device.executable_cache import ExecutableCache, hash_sources, make_manifest
from jaxserve.device.sampling import ROW_CHUNK, init_state, load_row
from jaxserve.device.step import DeviceState, StepOutput, serve_step
from jaxserve.models.registry import get_family
from pallas_kernels.paged_attention import Backend, ragged_paged_attention

ProgramKey = Bucket | str
COPY_BLOCKS = "copy_blocks"
LOAD_ROW = "load_row"


@dataclass(frozen=True)
class Programs:
    """The programs of an engine, as functions of abstract arrays.

    Attributes:
      step: `serve_step` but for its bucket and arrays.
      params: the model's NNX state, state: everything that a step changes; both of `jax.ShapeDtypeStruct`.
      keep_logits: steps return their logits as well.
      identity: by name, whatever else decides what the programs are; for the manifest.
    """

    step: Callable[..., Any]
    params: nnx.State
    state: DeviceState
    keep_logits: bool
    identity: dict[str, Any]


def describe_programs(
    model: ModelConfig,
    config: ResolvedConfig,
    *,
    attention: Backend,
    num_blocks: int,
    platform: str,
    sharding: jax.sharding.Sharding,
    keep_logits: bool = False,
) -> Programs:
    """The programs of an engine with this configuration.

    Args:
      num_blocks: usable KV blocks (the sink comes on top): part of the arrays' shapes.
      platform: what they will run on: "cpu", "gpu", ...
      sharding: of every array.
    """
    dtype = jnp.dtype(config.dtype)
    build = get_family(model.architecture).build
    graphdef, params = nnx.split(
        nnx.eval_shape(
            lambda: build(model, dtype=dtype, rngs=nnx.Rngs(0), deterministic=config.deterministic)
        )
    )
    state = jax.eval_shape(lambda: make_state(model, config, num_blocks))
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    params, state = jax.tree.map(place, (params, state))
    attention_options = {"scale": model.head_dim**-0.5, "backend": attention}
    rows_at_once = 1 if platform == "cpu" else config.max_num_seqs
    step = partial(
        serve_step,
        graphdef,
        # A jit of its own, so that a step traces attention once and not once a layer.
        jax.jit(partial(ragged_paged_attention, **attention_options)),
        rows_at_once,
        deterministic=config.deterministic,
        keep_logits=keep_logits,
    )
    identity = {
        "model": model,
        "attention": attention_options,
        "rows_at_once": rows_at_once,
        "step": {"deterministic": config.deterministic, "keep_logits": keep_logits},
        "arrays": (params, state),
    }
    return Programs(step, params, state, keep_logits, identity)


def make_state(model: ModelConfig, config: ResolvedConfig, num_blocks: int) -> DeviceState:
    """An empty device state; its last row of sampling state is for padding."""
    return DeviceState(
        kv_cache=kv_cache.allocate(model, num_blocks, config.block_size, jnp.dtype(config.dtype)),
        sampling=init_state(config.max_num_seqs + 1, model.vocab_size),
        last_token_ids_R=jnp.zeros(config.max_num_seqs + 1, jnp.int32),
    )


def program_keys(buckets: ShapeBuckets) -> list[ProgramKey]:
    """Everything that an engine may ever run."""
    return [*buckets.all_buckets(), COPY_BLOCKS, LOAD_ROW]


class ProgramMaker:
    """Makes the program of a key. Safe from several threads at once.

    Args:
      cache_directory: where compiled programs are kept between starts; None keeps none.

    Attributes:
      num_compiled: programs that were not found there.
    """

    def __init__(self, programs: Programs, cache_directory: Path | None) -> None:
        self._programs = programs
        self._lock = threading.Lock()
        self.num_compiled = 0
        self.cache: ExecutableCache | None = None
        # An interpreter's callbacks can't be stored.
        if cache_directory is not None and not programs.identity["attention"]["backend"].interpret:
            manifest = make_manifest(programs.identity, _SOURCES_DIGEST)
            self.cache = ExecutableCache(cache_directory, manifest)

    def __call__(self, key: ProgramKey) -> Any:
        """The program, ready to call with arrays of the described shapes."""
        function, donated, arguments, out_tree = _define(self._programs, key)
        in_tree = jax.tree.structure((arguments, {}))
        program = self.cache.load(str(key), in_tree, out_tree) if self.cache else None
        if program is None:
            program = jax.jit(function, donate_argnums=donated).lower(*arguments).compile()
            with self._lock:
                self.num_compiled += 1
            if self.cache:
                self.cache.store(str(key), program)
        return program


def _define(programs: Programs, key: ProgramKey) -> tuple[Callable[..., Any], int, tuple[Any, ...], Any]:
    """(function, donated argument, abstract arguments, structure of the result)."""
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    state = programs.state
    if isinstance(key, Bucket):
        batch = (programs.params, state, ints(packed_size(key)))
        output = StepOutput.structure(keep_logits=programs.keep_logits)
        return partial(programs.step, key), 1, batch, jax.tree.structure((state, output))
    if key == COPY_BLOCKS:
        copies = (state.kv_cache, ints(kv_cache.COPY_BATCH, 2))
        return kv_cache.copy_blocks, 0, copies, jax.tree.structure(state.kv_cache)
    assert key == LOAD_ROW
    values = jax.ShapeDtypeStruct((ROW_CHUNK,), jnp.float32)
    entries = (state.sampling, ints(), ints(), ints(ROW_CHUNK), ints(ROW_CHUNK), values)
    return load_row, 0, entries, jax.tree.structure(state.sampling)


def traced_sources() -> list[Path]:
    """Folders and files of all code that a step traces, constants included."""
    package = Path(__file__).parents[1]
    kernels = Path(pallas_kernels.__file__).parent
    parts = ("batch", "device", "models", "config.py", "request.py")
    return [*(package / part for part in parts), kernels]


# Now, while the files are what was imported: who edits them under a running process must not mislabel its programs.
_SOURCES_DIGEST = hash_sources(traced_sources())
