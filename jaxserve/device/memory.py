"""How many KV blocks the device has room for."""

from __future__ import annotations

import os
from pathlib import Path

import jax
import jax.numpy as jnp

from jaxserve.config import EngineConfig, ModelConfig, ResolvedConfig
from jaxserve.device.kv_cache import block_bytes
from jaxserve.errors import ConfigError

_CPU_FRACTION = 0.1  # of the machine's memory: a laptop wants to keep the rest
_ACCELERATOR_FRACTION = 0.85  # of the device's memory: leaves room for the step's temporaries


def plan_num_blocks(options: EngineConfig, config: ResolvedConfig, model: ModelConfig) -> int:
    """The number of usable KV blocks, called when the weights are on the device already.

    An explicit `options.num_blocks` is taken as it is. Otherwise the pool may take a fraction of the device's memory
    (on an accelerator: what that leaves beside the weights), but no more than all sequences at full length could
    fill. The fraction is of all memory, not of what happens to be free: the pool's size is part of the compiled
    programs' shapes, so that a restart finds its programs only if it finds the same number.

    Raises:
      ConfigError: not even one block fits; the text has the numbers.
    """
    if options.num_blocks is not None:
        if options.num_blocks < 1:
            raise ConfigError(f"num_blocks must be at least 1, got {options.num_blocks}")
        return options.num_blocks
    fraction = options.kv_cache_memory_fraction
    if fraction is None:
        fraction = _CPU_FRACTION if jax.default_backend() == "cpu" else _ACCELERATOR_FRACTION
    if not 0 < fraction <= 1:
        raise ConfigError(f"kv_cache_memory_fraction must be in (0, 1], got {fraction}")
    total, in_use, free = _memory()
    each = block_bytes(model, config.block_size, jnp.dtype(config.dtype))
    pool = int(total * fraction) - in_use
    if pool < each:
        raise ConfigError(
            f"{fraction:.0%} of {total} bytes of memory, less {in_use} in use, is too little for one KV block of "
            f"{each} bytes; raise the fraction or lower the block size"
        )
    num_blocks = min(pool // each, config.max_num_seqs * config.max_blocks_per_seq)
    if num_blocks * each > free:
        raise ConfigError(
            f"a KV cache of {num_blocks} blocks takes {num_blocks * each} bytes, but only {free} are free; "
            f"lower kv_cache_memory_fraction ({fraction:.0%}) or set num_blocks"
        )
    return num_blocks


def _memory() -> tuple[int, int, int]:
    """Bytes: (all there are, taken by this process on the device, free)."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        total, in_use = int(stats["bytes_limit"]), int(stats["bytes_in_use"])
        return total, in_use, total - in_use
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return total, 0, _available_host_bytes(total)


def _available_host_bytes(total: int) -> int:
    """What Linux says can be had without swapping; `total` where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return total
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), total)
