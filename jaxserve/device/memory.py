"""Before anything is allocated: how many KV blocks there are, and whether all that an engine needs fits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp

from jaxserve.config import EngineConfig, ModelConfig, ResolvedConfig
from jaxserve.device.kv_cache import block_bytes
from jaxserve.device.machine_memory import MachineMemory
from jaxserve.device.memory_account import MemoryAccount, readable_bytes
from jaxserve.errors import ConfigError
from jaxserve.scheduler.host_tier import HostSpace

_FRACTION = 0.9  # of all memory, for everything together
_HOST_FRACTION = 0.125  # of the host's memory, at most, where nothing is asked for
_CPU_POOL_FRACTION = 0.1  # for the pool of a CPU when nothing is asked for: a laptop wants to keep the rest
# What a process on a CPU is taken to need beside its arrays, before that can be measured. A fixed number: the pool's
# size is part of the compiled programs' shapes, so a restart finds its programs only if it finds the same number.
PROCESS_ALLOWANCE = 800 * 10**6


def size_pool(
    options: EngineConfig,
    config: ResolvedConfig,
    model: ModelConfig,
    *,
    machine: MachineMemory,
    weights: int,
    row_state: int,
    temporaries: Callable[[int], int],
    host_tier: int = 0,
    draft: ModelConfig | None = None,
) -> tuple[int, MemoryAccount]:
    """The number of usable KV blocks, and what memory will be for. Allocates nothing.

    An explicit `options.num_blocks` is taken as it is, if it fits. Otherwise the pool fills what is left of
    `options.memory_fraction`, with no more than all sequences at full length could fill. The fraction is of all memory,
    not of what happens to be free, so that it gives the same number at every start.

    Args:
      machine: before the engine has allocated anything.
      weights, row_state: bytes.
      temporaries: with so many blocks, the most bytes that a program needs while it runs. Compiles the largest
        program, so it is asked only about numbers that fit without: as a rule once, for the number that is used.
      host_tier: bytes, see `MemoryAccount`.
      draft: see `kv_cache.block_bytes`.

    Raises:
      ConfigError: something does not fit; one line that has the account.
    """
    fraction = _FRACTION if options.memory_fraction is None else options.memory_fraction
    if not 0 < fraction <= 1:
        raise ConfigError(f"memory_fraction must be in (0, 1], got {fraction}")
    if options.num_blocks is not None and options.num_blocks < 1:
        raise ConfigError(f"num_blocks must be at least 1, got {options.num_blocks}")
    each = block_bytes(model, config.block_size, jnp.dtype(config.dtype), draft)
    process = PROCESS_ALLOWANCE if machine.on_host else 0
    fixed = MemoryAccount(weights, each, row_state, 0, process, host_tier)
    budget = int(machine.total * fraction)
    number = options.num_blocks
    if number is None:
        number = min(max(0, budget - fixed.total) // each, config.max_num_seqs * config.max_blocks_per_seq)
        if machine.on_host and options.memory_fraction is None:
            number = min(number, max(1, int(machine.total * _CPU_POOL_FRACTION) // each))
    while True:
        account = dataclasses.replace(fixed, kv_cache=(number + 1) * each)
        _require_room(account, number, budget, machine, options, config)
        account = dataclasses.replace(account, temporaries=temporaries(number))
        over = account.total - budget
        if over <= 0 or options.num_blocks is not None:
            _require_room(account, number, budget, machine, options, config)
            return number, account
        number = max(0, number - -(-over // each))


def size_host_tier(
    options: EngineConfig,
    config: ResolvedConfig,
    model: ModelConfig,
    *,
    host: MachineMemory,
    draft: ModelConfig | None = None,
) -> HostSpace:
    """How many blocks host memory is to keep. Allocates nothing.

    Args:
      host: the machine's or the container's memory.
      draft: see `kv_cache.block_bytes`.

    Raises:
      ConfigError: what was asked for holds no block, or isn't there.
    """
    each = block_bytes(model, config.block_size, jnp.dtype(config.dtype), draft)
    size = config.host_memory
    if options.host_memory is None:
        size = min(size, int(host.total * _HOST_FRACTION))
    elif 0 < size < each:
        raise ConfigError(f"host_memory of {size} bytes holds no KV block; one takes {each}")
    number = size // each
    if number * each > host.available:
        raise ConfigError(
            f"host_memory: {readable_bytes(number * each)} for {number} KV blocks, and only "
            f"{readable_bytes(host.available)} are free; lower host_memory"
        )
    return HostSpace(number, each)


def _require_room(
    account: MemoryAccount,
    number: int,
    budget: int,
    machine: MachineMemory,
    options: EngineConfig,
    config: ResolvedConfig,
) -> None:
    """Raises ConfigError: the account is over the budget, or over what is free now, or the pool is of no use."""
    asked_length = options.max_model_len if options.num_blocks is None else None
    needed = 1 if asked_length is None else config.max_blocks_per_seq
    if number < needed:
        each = account.kv_cache // (number + 1)
        wanted = dataclasses.replace(account, kv_cache=(needed + 1) * each)
        raise ConfigError(
            f"too little memory for {_blocks(needed, config)}: together {readable_bytes(wanted.total)} "
            f"({wanted.line()}), of {readable_bytes(budget)} allowed ({_share(budget, machine)}); "
            + ("lower max_model_len or " if asked_length else "")
            + "raise memory_fraction"
        )
    new = account.total - (min(machine.used, account.process) if machine.on_host else 0)
    if account.total > budget:
        limit = f"of {readable_bytes(budget)} allowed ({_share(budget, machine)})"
    elif new > machine.available:
        limit = f"and only {readable_bytes(machine.available)} are free now"
    else:
        return
    raise ConfigError(
        f"{_blocks(number, config)} do not fit: together {readable_bytes(account.total)} ({account.line()}), {limit}; "
        f"lower num_blocks{'' if options.num_blocks is not None else ' or memory_fraction'}"
    )


def _blocks(number: int, config: ResolvedConfig) -> str:
    return f"{number} KV blocks of {config.block_size} tokens"


def _share(budget: int, machine: MachineMemory) -> str:
    return f"{budget / machine.total:.0%} of {readable_bytes(machine.total)}"
