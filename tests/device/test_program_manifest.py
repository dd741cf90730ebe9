from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.device.deviceless import identity_of
from jaxserve.device.program_manifest import (
    DeviceIdentity,
    describe_differences,
    local_device,
    make_manifest,
    shorten,
)
from jaxserve.device.targets import TARGETS
from tests.device.driver import MODEL

SOURCES = {"jaxserve/device/step.py": "11", "jaxserve/models/rope.py": "22"}
DEVICE = DeviceIdentity("gpu", "NVIDIA H200", {"jax-cuda13-plugin": "0.11.2"})


def manifest(**identity: Any) -> dict[str, Any]:
    defaults = {"model": MODEL, "max_num_seqs": 64, "arrays": "a"}
    return make_manifest(defaults | identity, SOURCES, DEVICE)


def test_it_is_json_and_comes_back_the_same() -> None:
    assert json.loads(json.dumps(manifest())) == manifest()
    assert manifest()["model"]["hidden_size"] == MODEL.hidden_size, "fields can be read"


def test_it_knows_what_decides_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    before = manifest()
    monkeypatch.setenv("XLA_FLAGS", "--xla_something")
    assert describe_differences(before, manifest()) == ["xla_flags none -> --xla_something"]
    monkeypatch.undo()
    old = jax.config.values["jax_default_matmul_precision"]
    jax.config.update("jax_default_matmul_precision", "highest")
    try:
        assert describe_differences(before, manifest()) == ["jax_default_matmul_precision none -> highest"]
    finally:
        jax.config.update("jax_default_matmul_precision", old)
    assert manifest() == before


def test_what_says_nothing_about_programs_is_left_out() -> None:
    names = manifest()["jax_config"]
    assert "jax_platforms" not in names
    assert not [name for name in names if name.endswith("_dir")]
    assert len(names) > 20


def test_a_cpu_is_told_by_its_features() -> None:
    here = local_device()
    assert here.platform == "cpu"
    assert here.details["cpu_features"]
    other = dataclasses.replace(here, details={**here.details, "cpu_features": "sse2"})
    assert describe_differences(
        make_manifest({}, SOURCES, here), make_manifest({}, SOURCES, other)
    ) == ["cpu_features changed"]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RealDevice:
    """What is asked of a device, as an H200 answers. There is none here."""

    platform: str = "gpu"
    device_kind: str = "NVIDIA H200"


def test_a_gpu_looks_for_what_was_compiled_for_it_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the compiling host is in the manifest: neither its CPU nor the platform it was told to use."""
    elsewhere = make_manifest({"a": 1}, SOURCES, identity_of(TARGETS["h200"]))
    before = jax.config.values["jax_platforms"]
    monkeypatch.setattr(jax, "local_devices", lambda: [RealDevice()])
    monkeypatch.setattr("jaxserve.device.program_manifest._cpu_features", lambda: "of another machine")
    jax.config.update("jax_platforms", "cuda")
    try:
        there = make_manifest({"a": 1}, SOURCES, local_device())
    finally:
        jax.config.update("jax_platforms", before)
    assert there == elsewhere
    assert make_manifest({"a": 1}, SOURCES, identity_of(TARGETS["a100"])) != elsewhere


CHANGES = {
    "version": ({"jaxlib": "0.11.1"}, ["jaxlib 0.11.1 -> 0.11.2"]),
    "setting": ({"max_num_seqs": 32}, ["max_num_seqs 32 -> 64"]),
    "setting and its shapes": ({"max_num_seqs": 32, "arrays": "b"}, ["max_num_seqs 32 -> 64"]),
    "shapes alone": ({"arrays": "b"}, ["shapes of parameters or state changed"]),
    "device": (
        {"device": {"platform": "gpu", "kind": "NVIDIA A100", "details": DEVICE.details}},
        ["device.kind NVIDIA A100 -> NVIDIA H200"],
    ),
    "one source": (
        {"sources": SOURCES | {"jaxserve/device/step.py": "33"}},
        ["source of the step changed (jaxserve/device/step.py)"],
    ),
    "a source that is gone, one that is new": (
        {"sources": {"x.py": "1", "jaxserve/models/rope.py": "22"}},
        ["source of the step changed (jaxserve/device/step.py, x.py)"],
    ),
    "a field that there was not yet": ({"quantization": "int8"}, ["quantization int8 -> none"]),
    "a field of a model": (
        {"model": dataclasses.asdict(dataclasses.replace(MODEL, num_layers=9))},
        [f"model.num_layers 9 -> {MODEL.num_layers}"],
    ),
    "a model": (
        {"model": {"hidden_size": 1, "num_layers": 2, "vocab_size": 3}, "arrays": "b"},
        ["another model"],
    ),
    "nothing": ({}, []),
}


@pytest.mark.parametrize(("old", "said"), CHANGES.values(), ids=CHANGES.keys())
def test_differences_are_said_in_a_few_words(old: dict[str, Any], said: list[str]) -> None:
    now = manifest() | {"jaxlib": "0.11.2"}
    assert describe_differences(now | old, now) == said


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=6,
)
TREES = st.dictionaries(st.sampled_from(["model", "sources", "arrays", "jax", "device"]), JSON, max_size=5)


@given(TREES, TREES)
def test_a_difference_is_never_silent(old: dict[str, Any], new: dict[str, Any]) -> None:
    """Whatever was read from a file; equal ones have none."""
    assert describe_differences(old, old) == []
    if _without_empty(old) != _without_empty(new):
        said = describe_differences(old, new)
        assert said
        assert "\n" not in shorten(["x"] * 9)


def _without_empty(tree: Any) -> Any:
    """An empty mapping holds nothing that could differ, nor does a field that is None."""
    if not isinstance(tree, dict):
        return tree
    kept = {name: _without_empty(value) for name, value in tree.items()}
    return {name: value for name, value in kept.items() if value not in (None, {})}


def test_many_differences_fit_a_line() -> None:
    assert shorten(["a", "b"]) == "a, b"
    assert shorten(list("abcdef")) == "a, b, c, d, and 2 more"
