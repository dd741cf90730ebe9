"""A workload in simulated time."""

from __future__ import annotations

import dataclasses
import time
from contextlib import closing
from dataclasses import dataclass

from jaxserve.config import ResolvedConfig, SchedulerKind
from jaxserve.errors import ConfigError
from jaxserve.recording.costs_file import EngineCosts
from jaxserve.scheduler.host_tier import HostSpace
from jaxserve.scheduler.output import SchedulerOutput
from jaxserve.simulation.drive import Drive, drive
from jaxserve.simulation.simulated_engine import VirtualClock, simulated_engine
from jaxserve.stats import SwapStats
from jaxserve.workload.traced_request import Workload

Rows = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class Variation:
    """What is to differ from the engine whose costs are known; None does not.

    Attributes:
      host_memory: bytes for KV blocks on the host.
      transfer_rate: bytes a second there and back, in the place of what was measured.
    """

    policy: str | None = None
    scheduler: SchedulerKind | None = None
    num_blocks: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_waiting: int | None = None
    host_memory: int | None = None
    transfer_rate: float | None = None

    def apply(self, config: ResolvedConfig) -> ResolvedConfig:
        """The configuration with these changes.

        Raises:
          ConfigError: beyond what has been recorded.
        """
        for name in ("max_num_seqs", "max_num_batched_tokens"):
            asked, known = getattr(self, name), getattr(config, name)
            if asked is not None and asked > known:
                raise ConfigError(
                    f"{name} {asked} is beyond the {known} of the recorded engine, whose larger steps are not known"
                )
        changes = {
            name: value
            for name in (field.name for field in dataclasses.fields(self))
            if name not in ("num_blocks", "transfer_rate") and (value := getattr(self, name)) is not None
        }
        changed = dataclasses.replace(config, **changes)
        if changed.max_num_batched_tokens < changed.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens ({changed.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({changed.max_num_seqs})"
            )
        return dataclasses.replace(
            changed,
            max_prefill_chunk=min(changed.max_prefill_chunk, changed.max_num_batched_tokens),
            overlap=changed.overlap and changed.scheduler != "static",
        )

    def host_space(self, costs: EngineCosts) -> HostSpace:
        """Room for KV blocks in host memory.

        Raises:
          ConfigError: it holds no block, or how fast blocks move is not known.
        """
        host = costs.engine.host
        if self.host_memory is not None:
            each = host.block_bytes  # told even of an engine without any
            host = HostSpace(self.host_memory // each, each)
            if self.host_memory and not host.num_blocks:
                raise ConfigError(
                    f"host_memory of {self.host_memory} bytes holds no KV block; one takes {each}"
                )
        if host.num_blocks and self.transfer_rates(costs) is None:
            raise ConfigError(
                "the costs are of an engine without host memory, so how fast blocks move is not known: give a transfer "
                "rate, or record an engine with --host-memory"
            )
        return host

    def transfer_rates(self, costs: EngineCosts) -> tuple[float, float] | None:
        """Bytes a second to host memory and back; None where nothing is known."""
        if self.transfer_rate is not None:
            return self.transfer_rate, self.transfer_rate
        return costs.transfer_rates


@dataclass(frozen=True, slots=True)
class Simulation:
    """What came.

    Attributes:
      wall_seconds: what it took here.
      swap: what host memory did.
      plans: (sequence, first token, tokens) of every row of every step; empty unless asked for.
    """

    drive: Drive
    wall_seconds: float
    swap: SwapStats
    plans: tuple[Rows, ...]


def simulate_workload(
    costs: EngineCosts,
    workload: Workload,
    variation: Variation | None = None,
    *,
    seed: int = 0,
    keep_plans: bool = False,
) -> Simulation:
    """Run a workload through a simulated engine.

    Args:
      seed: of the spread of step times.
      keep_plans: keep every step's rows, for comparing.

    Raises:
      ConfigError: the variation can't be; InvalidRequestError: a request could never run.
    """
    variation = variation or Variation()
    clock = VirtualClock()
    plans: list[Rows] = []

    def keep(plan: SchedulerOutput) -> None:
        rows = plan.scheduled
        plans.append(
            tuple((row.request_id, row.num_computed_tokens, row.num_scheduled_tokens) for row in rows)
        )

    engine = simulated_engine(
        costs,
        clock,
        config=variation.apply(costs.engine.config),
        num_blocks=variation.num_blocks or costs.engine.num_blocks,
        host=variation.host_space(costs),
        transfer_rates=variation.transfer_rates(costs),
        seed=seed,
        observe=keep if keep_plans else None,
    )
    began = time.perf_counter()
    with closing(engine):
        result = drive(engine, workload, clock)
    return Simulation(result, time.perf_counter() - began, engine.stats.swap, tuple(plans))
