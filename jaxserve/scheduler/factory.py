"""The scheduler that a configuration names."""

from __future__ import annotations

from jaxserve.config import ResolvedConfig
from jaxserve.scheduler.scheduler import Scheduler
from jaxserve.scheduler.static import StaticScheduler


def create_scheduler(config: ResolvedConfig, num_blocks: int) -> Scheduler | StaticScheduler:
    if config.scheduler == "static":
        return StaticScheduler(config, num_blocks)
    return Scheduler(config, num_blocks)
