"""How large an engine's pool is, decided together with its largest programs: what they need is part of the sum."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.config import EngineConfig, ModelConfig, ResolvedConfig
from jaxserve.device.block_swap import host_tier_bytes
from jaxserve.device.draft_model import DraftModel
from jaxserve.device.machine_memory import host_memory, machine_memory
from jaxserve.device.memory import size_host_tier, size_pool
from jaxserve.device.memory_account import MemoryAccount, tree_bytes
from jaxserve.device.program_definitions import describe_programs, make_hidden, make_state
from jaxserve.device.program_memory import temporary_bytes
from jaxserve.device.programs import ProgramMaker, essential_keys
from jaxserve.progress import Progress
from jaxserve.scheduler.host_tier import HostSpace
from pallas_kernels.paged_attention import Backend


@dataclass(frozen=True)
class MemoryPlan:
    """What was decided before anything is allocated.

    Attributes:
      num_blocks: usable KV blocks.
      host: room for blocks in host memory.
      account: what memory will be for.
      maker: of the engine's programs; it has made those that were measured.
    """

    num_blocks: int
    host: HostSpace
    account: MemoryAccount
    maker: ProgramMaker


def plan_memory(
    options: EngineConfig,
    config: ResolvedConfig,
    model: ModelConfig,
    *,
    weights: int,
    attention: Backend,
    buckets: ShapeBuckets,
    cache_directory: Path | None,
    progress: Progress,
    draft: DraftModel | None = None,
) -> MemoryPlan:
    """Decide the pool's size and make the largest programs (and the smallest step, which serving begins with too).

    Args:
      weights: bytes, those of a draft model or an exit included.
      cache_directory: see `ProgramMaker`.
      draft: what drafts on the device, if anything does.

    Raises:
      ConfigError: something does not fit; one line that has the account.
    """
    one_block, hidden = jax.eval_shape(lambda: (make_state(model, config, 1), make_hidden(draft, config)))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    keys = essential_keys(buckets, swaps=config.host_memory > 0, draft=draft)
    machine = machine_memory()
    cached = draft.cached if draft else None
    on_host = machine if machine.on_host else host_memory()
    host = size_host_tier(options, config, model, host=on_host, draft=cached)
    makers: dict[int, ProgramMaker] = {}

    def temporaries(num_blocks: int) -> int:
        programs = describe_programs(
            model,
            config,
            attention=attention,
            num_blocks=num_blocks,
            platform=jax.default_backend(),
            sharding=sharding,
            draft=draft,
        )
        for other in makers.values():  # of a number that was too large
            other.close()
        maker = makers[num_blocks] = ProgramMaker(programs, cache_directory)
        made = maker.prepare(keys, threads=os.cpu_count() or 1, progress=progress)
        return max(map(temporary_bytes, made))

    num_blocks, account = size_pool(
        options,
        config,
        model,
        machine=machine,
        weights=weights,
        row_state=tree_bytes((one_block.sampling, one_block.last_token_ids_R, hidden)),
        temporaries=temporaries,
        host_tier=host_tier_bytes(host, on_host=machine.on_host),
        draft=cached,
    )
    return MemoryPlan(num_blocks, host, account, makers[num_blocks])
