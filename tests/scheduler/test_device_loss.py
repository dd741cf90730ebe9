"""After the device has lost its state nothing of it counts: no cached prefix, no host block, no move under way."""

from __future__ import annotations

import pytest

from jaxserve.request import RequestStatus
from tests.fakes import make_group, make_request
from tests.scheduler.harness import Harness


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("host_blocks", [0, 20])
@pytest.mark.parametrize("steps", range(1, 12))
def test_what_ran_and_what_waited_goes_on_exactly(steps: int, host_blocks: int, overlap: bool) -> None:
    harness = Harness(9, host_blocks=host_blocks, overlap=overlap)
    harness.add(make_request("a", 12, 14), make_request("b", 9, 12), make_request("c", 12, 4))
    harness.add(*make_group("d", 11, 2, 6))
    for _ in range(steps):
        harness.step()
    harness.launch()  # and it never ends
    harness.lose_device()
    harness.drain()
    harness.check_drained()


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_in_host_memory_are_forgotten(overlap: bool, caching: bool) -> None:
    """They may never have come there: copies out are under way while the step that they belong to runs."""
    harness = Harness(16, host_blocks=40, overlap=overlap, enable_prefix_caching=caching)
    victim = make_request("victim", 24, 30, priority=1)
    harness.add(victim)
    while victim.num_output_tokens < 8:
        harness.step()
    harness.add(make_request("urgent", 40, 12))
    swap = harness.scheduler._kv.swap
    while not harness.runner.num_out:
        harness.step()
    assert victim.status is RequestStatus.WAITING
    assert swap.keeps(victim.request_id)
    assert swap.tier.num_used
    harness.launch()
    harness.lose_device()
    assert not swap.tier.num_used
    harness.drain()
    harness.check_drained()
    assert not harness.runner.num_in, "nothing had been brought to safety"
