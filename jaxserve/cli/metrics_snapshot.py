"""What a server's `/metrics` said at a moment, and what has happened between two of them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

from jaxserve.cli.server_url import BROKEN, open_url
from jaxserve.errors import ConfigError

_TIMEOUT_S = 10.0
_NEEDED = "vllm:num_requests_running"

Labels = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Attributes:
    time: seconds of `time.monotonic`.
    samples: (labels, value) of every sample, by its name.
    """

    time: float
    samples: Mapping[str, list[tuple[Labels, float]]]

    def value(self, name: str) -> float:
        """The sum over labels; 0 where there is no such metric."""
        return sum(value for _, value in self.samples.get(name, ()))

    def by(self, label: str, name: str) -> dict[str, float]:
        """Sums by the values of a label, in the server's order."""
        found: dict[str, float] = {}
        for labels, value in self.samples.get(name, ()):
            key = labels.get(label, "")
            found[key] = found.get(key, 0.0) + value
        return found


def take_snapshot(url: str, api_key: str | None) -> Snapshot:
    """Scrape a server.

    Raises:
      ConfigError: nobody answers there, or what comes are not the metrics of such a server.
    """
    from prometheus_client.parser import text_string_to_metric_families

    with open_url(f"{url}/metrics", api_key, timeout_s=_TIMEOUT_S) as response:
        try:
            data = response.read()
        except BROKEN as error:
            raise ConfigError(f"{url}/metrics: the answer broke off: {error}") from None
    samples: dict[str, list[tuple[Labels, float]]] = {}
    try:
        for family in text_string_to_metric_families(data.decode()):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append((sample.labels, sample.value))
    except ValueError:
        samples = {}
    if _NEEDED not in samples:
        raise ConfigError(f"{url}/metrics: not the metrics of a jaxserve server")
    return Snapshot(time.monotonic(), samples)


@dataclass(frozen=True, slots=True)
class Interval:
    """What has happened between two snapshots."""

    before: Snapshot
    after: Snapshot

    @property
    def seconds(self) -> float:
        return max(self.after.time - self.before.time, 1e-9)

    @property
    def is_restart(self) -> bool:
        """Counters went back: it is another process."""
        steps = "jaxserve:steps_total", "vllm:generation_tokens_total"
        return any(self.after.value(name) < self.before.value(name) for name in steps)

    def growth(self, name: str) -> float:
        """Of a counter."""
        return self.after.value(name) - self.before.value(name)

    def rate(self, name: str) -> float:
        """The same a second."""
        return self.growth(name) / self.seconds

    def growth_by(self, label: str, name: str) -> dict[str, float]:
        """Of a counter, by the values of a label."""
        before = self.before.by(label, name)
        return {key: value - before.get(key, 0.0) for key, value in self.after.by(label, name).items()}

    def percentile(self, name: str, share: float) -> float | None:
        """Of what a histogram has gained, interpolated within its class; None: nothing was observed.

        Args:
          share: 0.5 is the median.
        """
        gained = sorted(
            (math.inf if bound == "+Inf" else float(bound), count)
            for bound, count in self.growth_by("le", f"{name}_bucket").items()
        )
        if not gained or gained[-1][1] <= 0:
            return None
        rank, low, seen = share * gained[-1][1], 0.0, 0.0
        for bound, count in gained:
            if count >= rank and count > seen:
                if math.isinf(bound):
                    return low  # as much as the last bound, or more
                return low + (bound - low) * (rank - seen) / (count - seen)
            low, seen = bound, count
        return low
