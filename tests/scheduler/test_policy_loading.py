"""Policies by import path: the one of the documentation runs, and what is none is refused with the reason."""

from __future__ import annotations

import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.config import EngineConfig, ModelConfig, resolve
from jaxserve.errors import ConfigError
from jaxserve.request import ServiceTargets
from jaxserve.scheduler.fair_policy import FairPolicy
from jaxserve.scheduler.policy import ChunkedPrefillPolicy
from jaxserve.scheduler.policy_loading import load_policy
from tests.fakes import make_config, make_request
from tests.scheduler.harness import Harness

SCHEDULING = Path(__file__).resolve().parents[2] / "docs/scheduling.md"
MODEL = ModelConfig("LlamaForCausalLM", 97, 8, 8, 1, 1, 1, 8, 64)


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    """An importable module of the name `my_policy`."""
    made = types.ModuleType("my_policy")
    sys.modules["my_policy"] = made
    yield made
    del sys.modules["my_policy"]


def test_the_example_of_the_documentation_serves_the_earliest_deadline_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", SCHEDULING.read_text(), re.DOTALL)
    assert len(example.splitlines()) <= 35
    (tmp_path / "edf.py").write_text(example)
    monkeypatch.syspath_prepend(tmp_path)
    harness = Harness(100, max_num_seqs=1, policy="edf:EarliestDeadlineFirst")
    targets = {"a": 9.0, "b": 2.0, "c": 5.0, "none": None, "d": 0.5}
    requests = {name: make_request(name, 5, 3) for name in targets}
    for name, request in requests.items():
        request.targets = ServiceTargets(ttft_seconds=targets[name])
    harness.add(*requests.values())
    order: list[str] = []
    while harness.scheduler.has_unfinished:
        harness.step()
        order += [name for name, r in requests.items() if r.is_finished and name not in order]
    assert order == ["d", "none", "b", "c", "a"]
    harness.check_drained()


def test_without_a_path_it_is_the_fair_one() -> None:
    assert type(load_policy(make_config())) is FairPolicy


def test_a_weight_of_ones_own(module: types.ModuleType) -> None:
    class Weighted(FairPolicy):
        def weight(self, client: str) -> float:
            return 3.0 if client == "paying" else 1.0

    module.__dict__["Weighted"] = Weighted
    harness = Harness(100, max_num_seqs=1, policy="my_policy:Weighted")
    for number in range(40):
        for client in ("paying", "guest"):
            harness.add(make_request(f"{client}{number}", 5, 3, client=client))
    started: list[str] = []
    while len(started) < 40:
        started += [row.request.client for row in harness.step().scheduled if row.is_new]
    assert started.count("paying") == pytest.approx(30, abs=2)
    harness.drain()


class NoOrder:
    def __init__(self, config: object) -> None: ...


class NeedsMore(ChunkedPrefillPolicy):
    def __init__(self, config: object, more: object) -> None: ...


class NoChunk(ChunkedPrefillPolicy):
    def __init__(self, config: object) -> None: ...


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nothing", "must be package.module:Class"),
        (":Class", "must be package.module:Class"),
        ("my_policy:", "must be package.module:Class"),
        ("no_such_module_x:Class", "importing no_such_module_x failed: ModuleNotFoundError"),
        ("my_policy:Absent", "my_policy has no class Absent"),
        ("my_policy:number", "my_policy has no class number"),
        ("my_policy:NoOrder", "lacks order, admitted, ended, is_long, lane_share, divide"),
        ("my_policy:NeedsMore", "could not be made with the configuration: TypeError"),
        ("my_policy:NoChunk", "max_prefill_chunk must be an integer"),
    ],
)
def test_what_is_no_policy_is_refused(module: types.ModuleType, path: str, reason: str) -> None:
    module.__dict__.update(NoOrder=NoOrder, NeedsMore=NeedsMore, NoChunk=NoChunk, number=3)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        load_policy(make_config(policy=path))


def test_a_module_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_policy.py").write_text("import jaxserve\n1 / 0\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="importing broken_policy failed: ZeroDivisionError"):
        load_policy(make_config(policy="broken_policy:Policy"))


def test_options_that_make_no_sense_are_refused() -> None:
    for options, name in (
        (EngineConfig(scheduler="static", policy="a:B"), "policy"),
        (EngineConfig(max_waiting_tokens=0), "max_waiting_tokens"),
        (EngineConfig(background_max_wait=-1.0), "background_max_wait"),
        (EngineConfig(background_max_wait=float("nan")), "background_max_wait"),
    ):
        with pytest.raises(ConfigError, match=name):
            resolve(options, MODEL, platform="cpu")
