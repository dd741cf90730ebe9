"""Sizing the pool. What a machine holds is given, so that every kind of machine can be met."""

from __future__ import annotations

import dataclasses
import re

import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.config import EngineConfig, ModelConfig
from jaxserve.device.block_swap import NUM_BUFFERS, host_tier_bytes
from jaxserve.device.kv_cache import block_bytes
from jaxserve.device.machine_memory import MachineMemory
from jaxserve.device.memory import PROCESS_ALLOWANCE, size_host_tier, size_pool
from jaxserve.device.memory_account import MemoryAccount
from jaxserve.errors import ConfigError
from jaxserve.scheduler.host_tier import HostSpace
from tests.fakes import make_config

MODEL = ModelConfig("LlamaForCausalLM", 256, 32, 64, 2, 4, 2, 8, 128)
CONFIG = make_config(max_num_seqs=4, max_model_len=64, block_size=4)  # 64 blocks fill all sequences
ALL = CONFIG.max_num_seqs * CONFIG.max_blocks_per_seq
EACH = block_bytes(MODEL, CONFIG.block_size, jnp.float32)
WEIGHTS, ROW_STATE = 3 * EACH, EACH
FIXED = WEIGHTS + ROW_STATE + EACH  # with the sink


def device(total: int, *, available: int | None = None) -> MachineMemory:
    """An accelerator."""
    return MachineMemory(total, total if available is None else available, 0, on_host=False)


def host(total: int, *, available: int | None = None, used: int = 0) -> MachineMemory:
    return MachineMemory(total, total if available is None else available, used, on_host=True)


def plan(
    machine: MachineMemory,
    num_blocks: int | None = None,
    fraction: float | None = 1.0,
    *,
    temporaries: int = 0,
    asked: list[int] | None = None,
    max_model_len: int | None = None,
) -> tuple[int, MemoryAccount]:
    def probe(number: int) -> int:
        (asked if asked is not None else []).append(number)
        return temporaries

    return size_pool(
        EngineConfig(num_blocks=num_blocks, memory_fraction=fraction, max_model_len=max_model_len),
        CONFIG,
        MODEL,
        machine=machine,
        weights=WEIGHTS,
        row_state=ROW_STATE,
        temporaries=probe,
    )


def refusal(*args: object, **named: object) -> str:
    with pytest.raises(ConfigError) as refused:
        plan(*args, **named)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)
    for kind in ("weights", "KV cache", "row state", "temporaries", "process", "together"):
        assert re.search(rf"{kind} \d+\.\d+ [GM]B", str(refused.value)), kind
    return str(refused.value)


def test_an_explicit_number_is_taken_if_it_fits() -> None:
    number, account = plan(device(FIXED + 1000 * EACH), 1000)
    assert number == 1000
    assert account.total == FIXED + 1000 * EACH
    assert "1001 KV blocks of 4 tokens do not fit" in refusal(device(FIXED + 1000 * EACH), 1001)


@pytest.mark.parametrize("number", [0, -1])
def test_an_explicit_number_below_one_is_refused(number: int) -> None:
    with pytest.raises(ConfigError, match=f"num_blocks must be at least 1, got {number}"):
        plan(device(10**9), number)


@pytest.mark.parametrize("fraction", [0.0, -0.1, 1.01, float("nan"), float("inf")])
def test_a_fraction_out_of_range_is_refused(fraction: float) -> None:
    with pytest.raises(ConfigError, match=r"memory_fraction must be in \(0, 1\], got"):
        plan(device(10**9), fraction=fraction)


@given(
    room=st.integers(0, 2 * ALL * EACH),
    temporaries=st.integers(0, ALL * EACH),
    fraction=st.sampled_from([0.25, 0.9, 1.0]),
)
def test_the_pool_fills_what_is_left_and_nothing_is_over_the_budget(
    room: int, temporaries: int, fraction: float
) -> None:
    machine = device(FIXED + room)
    budget = int(machine.total * fraction)
    asked: list[int] = []
    wanted = min(ALL, (budget - FIXED - temporaries) // EACH)
    if wanted < 1:
        refusal(machine, fraction=fraction, temporaries=temporaries)
        return
    number, account = plan(machine, fraction=fraction, temporaries=temporaries, asked=asked)
    assert number == wanted
    assert account.total == FIXED + number * EACH + temporaries <= budget
    assert asked[-1] == number
    assert len(asked) == len(set(asked)) <= 2, (
        "programs are compiled for one number, or for a second if need be"
    )


def test_nothing_is_compiled_for_what_can_not_fit() -> None:
    asked: list[int] = []
    refusal(device(FIXED + 9 * EACH), 10, asked=asked)
    refusal(device(FIXED), asked=asked)
    assert asked == []


def test_an_explicit_number_that_leaves_no_room_for_a_step_is_refused() -> None:
    machine = device(FIXED + 10 * EACH)
    assert plan(machine, 10)[0] == 10
    assert plan(machine, 9, temporaries=EACH)[0] == 9
    assert "do not fit" in refusal(machine, 10, temporaries=1)


def test_the_process_counts_where_it_shares_the_memory() -> None:
    room = FIXED + 10 * EACH
    assert plan(device(room))[0] == plan(host(room + PROCESS_ALLOWANCE))[0] == 10
    assert plan(host(room + PROCESS_ALLOWANCE))[1].process == PROCESS_ALLOWANCE


def test_without_a_wish_a_cpu_keeps_most_of_its_memory() -> None:
    total = 10 * (PROCESS_ALLOWANCE + FIXED)
    pool = total // 10 // EACH
    big = dataclasses.replace(CONFIG, max_num_seqs=10**6)
    number, _ = size_pool(
        EngineConfig(), big, MODEL, machine=host(total), weights=0, row_state=0, temporaries=lambda n: 0
    )
    assert number == pool
    number, _ = size_pool(
        EngineConfig(), big, MODEL, machine=device(total), weights=0, row_state=0, temporaries=lambda n: 0
    )
    assert number == int(total * 0.9) // EACH - 1


def test_what_other_programs_have_is_not_free() -> None:
    text = refusal(host(10**10, available=PROCESS_ALLOWANCE, used=0))
    assert f"only {PROCESS_ALLOWANCE / 1e6:.1f} MB are free now" in text
    # What this process has already needs no room.
    assert plan(host(10**10, available=FIXED + ALL * EACH, used=PROCESS_ALLOWANCE))[0] == ALL


def test_a_length_that_was_asked_for_must_fit() -> None:
    """The model's own may be longer than the pool: then requests are refused, one by one, by what fits."""
    per_sequence = CONFIG.max_blocks_per_seq
    machine = device(FIXED + (per_sequence - 1) * EACH)
    assert plan(machine)[0] == per_sequence - 1
    assert "lower max_model_len or raise memory_fraction" in refusal(machine, max_model_len=64)
    assert plan(device(FIXED + per_sequence * EACH), max_model_len=64)[0] == per_sequence
    assert plan(machine, 1, max_model_len=64)[0] == 1, "both were asked for"


def test_what_happens_to_be_free_changes_nothing() -> None:
    """The number is part of the programs' shapes: a restart must find the same."""
    total = 10 * PROCESS_ALLOWANCE
    assert {plan(host(total, available=free))[0] for free in (total // 2, total // 3, total)} == {ALL}


def test_half_the_bytes_give_twice_the_blocks() -> None:
    half = dataclasses.replace(CONFIG, dtype="bfloat16")
    number, _ = size_pool(
        EngineConfig(memory_fraction=1.0),
        half,
        MODEL,
        machine=device(10 * EACH + EACH // 2),
        weights=0,
        row_state=0,
        temporaries=lambda n: 0,
    )
    assert number == 20


@given(size=st.integers(0, 40 * EACH), total=st.integers(0, 100 * EACH), share=st.floats(0, 1))
def test_host_memory_that_is_asked_for_is_had_or_refused(size: int, total: int, share: float) -> None:
    config = dataclasses.replace(CONFIG, host_memory=size)
    memory = host(total, available=int(total * share))
    options = EngineConfig(host_memory=size)
    if 0 < size < EACH or size // EACH * EACH > memory.available:
        with pytest.raises(ConfigError, match="host_memory"):
            size_host_tier(options, config, MODEL, host=memory)
    else:
        assert size_host_tier(options, config, MODEL, host=memory) == HostSpace(size // EACH, EACH)


def test_host_memory_by_default_is_an_eighth_at_most() -> None:
    config = dataclasses.replace(CONFIG, host_memory=100 * EACH)
    sized = lambda total: size_host_tier(EngineConfig(), config, MODEL, host=host(total))  # noqa: E731
    assert sized(80 * EACH).num_blocks == 10
    assert sized(8000 * EACH).num_blocks == 100


def test_host_memory_counts_where_it_is_the_devices() -> None:
    """And what is on its way, everywhere."""
    space = HostSpace(50, EACH)
    assert host_tier_bytes(space, on_host=True) == (50 + NUM_BUFFERS) * EACH
    assert host_tier_bytes(space, on_host=False) == NUM_BUFFERS * EACH
    assert host_tier_bytes(HostSpace(0, EACH), on_host=True) == 0
    together = FIXED + 10 * EACH
    arguments = {"weights": WEIGHTS, "row_state": ROW_STATE, "temporaries": lambda number: 0}
    options = EngineConfig(memory_fraction=1.0)
    without, _ = size_pool(options, CONFIG, MODEL, machine=device(together), **arguments)
    number, account = size_pool(
        options, CONFIG, MODEL, machine=device(together), host_tier=3 * EACH, **arguments
    )
    assert (without, number, account.host_tier, account.total) == (10, 7, 3 * EACH, together)
