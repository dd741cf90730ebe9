"""How many KV blocks the device has room for."""

from __future__ import annotations

import os

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig, ModelConfig, ResolvedConfig
from jaxserve.device.kv_cache import block_bytes
from jaxserve.errors import ConfigError

_CPU_FRACTION = 0.1  # of free host memory: a laptop wants to keep the rest
_ACCELERATOR_FRACTION = 0.85  # leaves room for the step's temporaries


def plan_num_blocks(options: EngineConfig, config: ResolvedConfig, model: ModelConfig) -> int:
    """The number of usable KV blocks, called when the weights are on the device already.

    An explicit `options.num_blocks` is taken as it is. Otherwise the pool takes its fraction of what is free, but no
    more than all sequences at full length could fill.

    Raises:
      ConfigError: not even one sequence of one block fits; the text has the numbers.
    """
    if options.num_blocks is not None:
        if options.num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {options.num_blocks}")
        return options.num_blocks
    free = _free_bytes()
    on_cpu = jax.default_backend() == "cpu"
    fraction = options.kv_cache_memory_fraction
    if fraction is None:
        fraction = _CPU_FRACTION if on_cpu else _ACCELERATOR_FRACTION
    if not 0 < fraction <= 1:
        raise ConfigError(f"kv_cache_memory_fraction must be in (0, 1], got {fraction}")
    each = block_bytes(model, config.block_size, jnp.dtype(config.dtype))
    affordable = int(free * fraction) // each
    if affordable < 1:
        raise ConfigError(
            f"{fraction:.0%} of {free} free bytes is too little for one KV block of {each} bytes; "
            "raise the fraction or lower the block size"
        )
    return min(affordable, config.max_num_seqs * config.max_blocks_per_seq)


def _free_bytes() -> int:
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"]) - int(stats["bytes_in_use"])
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
