"""What the cases of one worker share: the device, and things that are dear to make."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Workplace:
    """Attributes:
    cpu: this is a self-test of the logic: kernels are interpreted, sizes are tiny.
    """

    cpu: bool
    _kept: dict[str, Any] = field(default_factory=dict)

    def keep(self, name: str, key: Any, make: Callable[[], Any]) -> Any:
        """What `make` returns; made again only when the key is another. The old one is dropped first."""
        if name not in self._kept or self._kept[name][0] != key:
            self._kept.pop(name, None)
            self._kept[name] = (key, make())
        return self._kept[name][1]

    def backend_name(self, name: str) -> str:
        """A Pallas backend's own name, or that of its interpreted form."""
        return f"{name}-interpret" if self.cpu and name.startswith("pallas") else name
