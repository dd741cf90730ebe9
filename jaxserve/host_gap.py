"""How long the device has nothing to do because the host is not ready with the next step."""

from __future__ import annotations


class HostGap:
    """Sums, over steps, the time from when the device was last seen at work until the next step was handed to it.

    A step that was handed over while the device worked adds nothing. With overlap the device may run dry between two
    looks, and the time since the earlier look counts then: an upper bound. Time without any work doesn't count.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        self._seen_busy: float | None = None

    def busy(self, now: float) -> None:
        """The device works at `now` (seconds of any one clock), or has worked until then."""
        self._seen_busy = now

    def launched(self, now: float) -> None:
        """A step has been handed over; `busy` says so too where the device still works just before."""
        if self._seen_busy is not None:
            self.seconds += now - self._seen_busy
        self._seen_busy = now

    def out_of_work(self) -> None:
        """Nothing is left to run: what follows until the next step is no gap."""
        self._seen_busy = None
