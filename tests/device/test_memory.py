"""Sizing the pool. What a machine holds is given, so that every kind of machine can be met."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import pytest

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.device import memory
from jaxserve.device.kv_cache import block_bytes
from jaxserve.device.memory import plan_num_blocks
from jaxserve.errors import ConfigError
from tests.fakes import make_config

MODEL = ModelConfig("LlamaForCausalLM", 256, 32, 64, 2, 4, 2, 8, 128)
CONFIG = make_config(max_num_seqs=4, max_model_len=64, block_size=4)  # 64 blocks fill all sequences
EACH = block_bytes(MODEL, CONFIG.block_size, jnp.float32)
Machine = Callable[[int, int, int], None]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Sets (total, in use, free) bytes."""
    return lambda *sizes: monkeypatch.setattr(memory, "_memory", lambda: sizes)


def plan(num_blocks: int | None = None, fraction: float | None = None) -> int:
    options = EngineConfig(num_blocks=num_blocks, kv_cache_memory_fraction=fraction)
    return plan_num_blocks(options, CONFIG, MODEL)


def test_an_explicit_number_is_taken_as_it_is(machine: Machine) -> None:
    machine(0, 0, 0)
    assert plan(num_blocks=1) == 1
    assert plan(num_blocks=10**9, fraction=7.0) == 10**9


@pytest.mark.parametrize("number", [0, -1])
def test_an_explicit_number_below_one_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=f"num_blocks must be at least 1, got {number}"):
        plan(num_blocks=number)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan"), float("inf")])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache_memory_fraction must be in \(0, 1\], got"):
        plan(fraction=fraction)


@pytest.mark.parametrize(("blocks", "expected"), [(1, 1), (17, 17), (64, 64), (65, 64), (10**6, 64)])
def test_the_pool_takes_its_share_and_never_more_than_can_be_used(
    machine: Machine, blocks: int, expected: int
) -> None:
    machine(2 * blocks * EACH, 0, 2 * blocks * EACH)
    assert plan(fraction=0.5) == expected


def test_a_partial_block_does_not_count(machine: Machine) -> None:
    machine(3 * EACH - 1, 0, 3 * EACH)
    assert plan(fraction=1.0) == 2


@pytest.mark.parametrize(
    ("total", "in_use"), [(0, 0), (EACH - 1, 0), (10 * EACH, 9 * EACH + 1), (EACH, 5 * EACH)]
)
def test_room_for_less_than_one_block_is_refused_with_numbers(
    machine: Machine, total: int, in_use: int
) -> None:
    machine(total, in_use, total)
    with pytest.raises(ConfigError) as refusal:
        plan(fraction=1.0)
    for number in (total, in_use, EACH):
        assert str(number) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_pool_that_does_not_fit_beside_other_programs_is_refused_with_numbers(machine: Machine) -> None:
    machine(100 * EACH, 0, 9 * EACH)
    assert plan(fraction=0.09) == 9
    with pytest.raises(ConfigError) as refusal:
        plan(fraction=0.1)
    for number in (10, 10 * EACH, 9 * EACH):
        assert str(number) in str(refusal.value)


def test_what_happens_to_be_free_changes_nothing(machine: Machine) -> None:
    """The number is part of the programs' shapes: a restart must find the same."""
    numbers = set()
    for free in (50, 70, 100):
        machine(100 * EACH, 0, free * EACH)
        numbers.add(plan(fraction=0.3))
    assert numbers == {30}


def test_this_machine_has_memory() -> None:
    total, in_use, free = memory._memory()
    assert 0 < free <= total
    assert 0 <= in_use < total
    assert plan() == CONFIG.max_num_seqs * CONFIG.max_blocks_per_seq


def test_half_the_bytes_give_twice_the_blocks(machine: Machine) -> None:
    machine(10 * EACH, 0, 10 * EACH)
    half = dataclasses.replace(CONFIG, dtype="bfloat16")
    assert plan_num_blocks(EngineConfig(kv_cache_memory_fraction=1.0), half, MODEL) == 20
