"""The scheduler that a configuration names."""

from __future__ import annotations

from jaxserve.config import ResolvedConfig
from jaxserve.scheduler.host_tier import HostSpace
from jaxserve.scheduler.policy_loading import load_policy
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.static import StaticScheduler
from jaxserve.scheduler.step_time import StepTimeModel


def create_scheduler(
    config: ResolvedConfig, num_blocks: int, step_times: StepTimeModel, host: HostSpace | None = None
) -> Scheduler | StaticScheduler:
    """
    Args:
      step_times: what the engine learns of its steps; the scheduler only asks it.
      host: room for blocks in host memory; None is none. The static scheduler uses none.

    Raises:
      ConfigError: `config.policy` can't be had.
    """
    if config.scheduler == "static":
        return StaticScheduler(config, num_blocks, step_times)
    return Scheduler(config, num_blocks, step_times, load_policy(config), host)
