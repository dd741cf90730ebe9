"""What an engine's memory is for, in bytes."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import jax

_NAMES = {
    "weights": "weights",
    "kv_cache": "KV cache",
    "row_state": "row state",
    "host_tier": "host tier",
    "temporaries": "temporaries",
    "process": "process",
}


@dataclass(frozen=True, slots=True)
class MemoryAccount:
    """Bytes by what they are for.

    Attributes:
      weights: the model's parameters.
      kv_cache: all blocks, the sink included.
      row_state: what sampling remembers of each running sequence.
      host_tier: blocks in host memory, and on their way there and back; on an accelerator only the latter, which are on
        the device.
      temporaries: the most that any program needs beside those while it runs, results included.
      process: interpreter, libraries, XLA's runtime, loaded programs and requests; on an accelerator, whatever its
        runtime takes there.
    """

    weights: int
    kv_cache: int
    row_state: int
    temporaries: int
    process: int
    host_tier: int = 0

    @property
    def total(self) -> int:
        return sum(self.by_kind().values())

    @property
    def arrays(self) -> int:
        """What lives as long as the engine does."""
        return self.weights + self.kv_cache + self.row_state + self.host_tier

    def by_kind(self) -> dict[str, int]:
        return asdict(self)

    def line(self) -> str:
        """On one line, for errors."""
        return ", ".join(f"{_NAMES[kind]} {readable_bytes(size)}" for kind, size in self.by_kind().items())

    def table(self) -> str:
        """A line for each kind, for logs."""
        rows = [*((_NAMES[kind], size) for kind, size in self.by_kind().items()), ("together", self.total)]
        return "\n".join(f"  {name:<12}{readable_bytes(size):>12}" for name, size in rows)


def tree_bytes(tree: Any) -> int:
    """Of arrays, or of shapes that will be arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def readable_bytes(size: int) -> str:
    """ "1.234 GB", "0.5 MB": of 10^9 and 10^6."""
    return f"{size / 1e9:.3f} GB" if size >= 10**9 else f"{size / 1e6:.1f} MB"
