"""After the device has lost its state nothing of it counts: no cached prefix, no host block, no move under way."""

from __future__ import annotations

import pytest

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
