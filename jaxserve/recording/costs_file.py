"""What an engine's steps cost, on disk: what `jaxserve simulate` runs on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from jaxserve.engine import EngineCore
from jaxserve.errors import ConfigError
from jaxserve.recording.engine_description import EngineDescription, describe_engine
from jaxserve.scheduler.step_time import RoundUp, StepTimeModel

_VERSION = 1


@dataclass(frozen=True, slots=True)
class EngineCosts:
    """An engine and how long its steps take.

    Attributes:
      step_times: see `StepTimeModel.to_dict`.
      transfer_rates: bytes a second to host memory and back, as measured; None for an engine without host memory.
    """

    engine: EngineDescription
    step_times: dict[str, Any]
    transfer_rates: tuple[float, float] | None = None

    def step_time_model(self, round_up: RoundUp) -> StepTimeModel:
        """A model that has learned what the engine's had."""
        return StepTimeModel.from_dict(self.step_times, round_up)


def costs_of(engine: EngineCore) -> EngineCosts:
    """What an engine has learned by now."""
    swap = engine.stats.swap
    rates = (swap.out_bytes_per_second, swap.in_bytes_per_second) if engine.host.num_blocks else None
    return EngineCosts(describe_engine(engine), engine.step_times.to_dict(), rates)


def write_costs(path: Path, costs: EngineCosts) -> None:
    """Write a file for `read_costs`. Raises OSError."""
    content = {"jaxserve_costs": _VERSION, **msgspec.to_builtins(costs)}
    path.write_bytes(msgspec.json.format(msgspec.json.encode(content)) + b"\n")


def read_costs(path: Path) -> EngineCosts:
    """Read a file of costs.

    Raises:
      ConfigError: one line that names the file, and what is wrong with it.
    """
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path}: is not JSON ({error})") from error
    if not isinstance(content, dict) or "jaxserve_costs" not in content:
        raise ConfigError(f"{path}: is no file of step costs (see --record-costs of serve)")
    if content["jaxserve_costs"] != _VERSION:
        raise ConfigError(f"{path}: version {content['jaxserve_costs']!r} of the format is not known here")
    try:
        costs = msgspec.convert(content, EngineCosts)
        model = costs.step_time_model(lambda tokens, seqs: (tokens, seqs))
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if costs.transfer_rates is not None and min(costs.transfer_rates) <= 0:
        raise ConfigError(f"{path}: transfer rates must be more than 0, got {costs.transfer_rates}")
    if not model.is_ready:
        raise ConfigError(f"{path}: was learned from {model.num_steps} steps, too few to predict any")
    return costs
