"""Replaying a recording: on the same engine, does it do the same? And under another policy, in simulated time."""

from __future__ import annotations

import json
import tempfile
from contextlib import closing
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import msgspec

from jaxserve.batch.bucket_plan_file import plan_content
from jaxserve.config import EngineConfig, replace
from jaxserve.engine_factory import create_engine
from jaxserve.errors import ConfigError
from jaxserve.progress import Progress
from jaxserve.recording.costs_file import EngineCosts
from jaxserve.recording.engine_description import describe_engine, first_mismatch
from jaxserve.recording.event_reader import Recording
from jaxserve.recording.recorded_workload import RecordedTraffic, recorded_traffic
from jaxserve.recording.replay import ReplayedEngine, ReplayReport, replay_events
from jaxserve.simulation.drive import Drive
from jaxserve.simulation.simulate import Rows, Variation, simulate_workload


def replay_recording(recording: Recording, model: str | None, progress: Progress) -> ReplayReport:
    """Make the recorded engine again, and do with it what was done with the first.

    Args:
      model: where the model is; None is where it was.

    Raises:
      ConfigError: the engine that can be made here is another one, or a line of the recording is damaged.
    """
    header = recording.header
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder) / "shapes.json"
        plan.write_text(json.dumps(plan_content(header.engine.buckets().seqs_by_tokens)))
        options = replace(
            _options(recording),
            num_blocks=header.engine.num_blocks,
            host_memory=header.engine.config.host_memory,
            bucket_plan=str(plan),
            record=None,
            record_costs=None,
            record_steps=None,
        )
        engine = create_engine(model or header.model, options, progress=progress, make=ReplayedEngine)
    with closing(engine):
        assert isinstance(engine, ReplayedEngine)
        mismatch = first_mismatch(header.engine, describe_engine(engine))
        if mismatch is not None:
            raise ConfigError(f"{recording.path}: was recorded on another engine: {mismatch}")
        return replay_events(engine, recording.events())


@dataclass(frozen=True, slots=True)
class PolicyComparison:
    """Two policies on the arrivals of a recording, both in simulated time.

    Attributes:
      traffic: the recording itself.
      recorded, other: passes with its policy and with the other one.
      departure: number of the first step, from 0, whose rows differ; None where none does.
      row: what it is about.
    """

    traffic: RecordedTraffic
    recorded: Drive
    other: Drive
    departure: int | None
    row: str


def compare_policies(recording: Recording, policy: str) -> PolicyComparison:
    """Simulate a recording's arrivals with its own policy and with another, steps taking what they took.

    Raises:
      ConfigError: the policy can't be had, the recording is damaged, or has too few steps to learn from.
    """
    described = recording.header.engine
    traffic = recorded_traffic(recording.path.stem, recording.events(), described.buckets())
    if not traffic.step_times.is_ready or not traffic.workload.requests:
        raise ConfigError(f"{recording.path}: has too few steps to learn from")
    costs = EngineCosts(described, traffic.step_times.to_dict(), traffic.transfer_rates)
    mine = simulate_workload(costs, traffic.workload, Variation(), keep_plans=True)
    other = simulate_workload(costs, traffic.workload, Variation(policy=policy), keep_plans=True)
    for step, (one, two) in enumerate(zip_longest(mine.plans, other.plans)):
        if one != two:
            return PolicyComparison(traffic, mine.drive, other.drive, step, _departure(one, two))
    return PolicyComparison(traffic, mine.drive, other.drive, None, "")


def _departure(one: Rows | None, two: Rows | None) -> str:
    for mine, other in zip_longest(one or (), two or ()):
        if mine != other:
            return f"{_row(other)} instead of {_row(mine)}"
    return "it is another step"


def _row(row: tuple[str, int, int] | None) -> str:
    if row is None:
        return "nobody"
    request, start, count = row
    return f"{request} computes {count} token{'s' if count > 1 else ''} from {start} on"


def _options(recording: Recording) -> EngineConfig:
    try:
        return msgspec.convert(recording.header.options, EngineConfig)
    except ValueError as error:
        raise ConfigError(f"{recording.path}: line 1: {error}") from error
