"""Whether to move KV blocks to host memory and back, or to compute their tokens again: by seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.outputs import BlockTransfers
from jaxserve.scheduler.step_time import StepTimeModel, StepWork

# Until a transfer has been measured: what the slowest link between a GPU and its host (PCIe 3.0 x1) does.
DEFAULT_BYTES_PER_SECOND = 1e9
_NEWEST_SHARE = 0.2  # of a rate that the newest measurement decides
_TRIAL = 64  # after so many decisions against moving, move once: a rate that has got better shows only so


@dataclass(slots=True)
class SwapCost:
    """What moving costs, learned from the transfers that steps report, against what the step times say of computing.

    Attributes:
      block_bytes, block_size: of one block.
      chunk: most tokens that one step computes again for a request.
      step_times: predicts a step's seconds. Before it does, moving is taken to be cheaper: it is on every machine that
        was tried, and the first steps teach the model.
      out_rate, in_rate: bytes a second, to the host and back.
    """

    block_bytes: int
    block_size: int
    chunk: int
    step_times: StepTimeModel
    out_rate: float = DEFAULT_BYTES_PER_SECOND
    in_rate: float = DEFAULT_BYTES_PER_SECOND
    _measured: set[str] = field(default_factory=set)
    _refusals: int = 0

    def observe(self, transfers: BlockTransfers) -> None:
        """Learn from what a step has moved."""
        self.out_rate = self._blend("out", self.out_rate, transfers.out_bytes, transfers.out_seconds)
        self.in_rate = self._blend("in", self.in_rate, transfers.in_bytes, transfers.in_seconds)

    def _blend(self, way: str, rate: float, num_bytes: int, seconds: float) -> float:
        if num_bytes <= 0 or seconds <= 0:
            return rate
        seen = num_bytes / seconds
        if way not in self._measured:
            self._measured.add(way)
            return seen
        return rate + _NEWEST_SHARE * (seen - rate)

    def moving_is_cheaper(self, num_out: int, num_in: int, num_tokens: int) -> bool:
        """Whether to move so many blocks out, and in again later, rather than to compute `num_tokens` again."""
        computing = self._seconds_to_compute(num_tokens)
        if computing is None or self._seconds_to_move(num_out, num_in) < computing:
            return True
        self._refusals += 1
        return self._refusals % _TRIAL == 0

    def _seconds_to_move(self, num_out: int, num_in: int) -> float:
        return self.block_bytes * (num_out / self.out_rate + num_in / self.in_rate)

    def _seconds_to_compute(self, num_tokens: int) -> float | None:
        """In chunks as large as a step takes, each at the mean number of (query, key) pairs."""
        chunk = min(self.chunk, num_tokens)
        pairs = num_tokens * (num_tokens + 1) // 2
        seconds = self.step_times.predict(StepWork(chunk, 1, 0, pairs * chunk // num_tokens))
        return None if seconds is None else seconds * num_tokens / chunk
