"""Start-time fair queueing of tokens between clients.

A request gets a start tag when it arrives: the virtual time, or where its client's request before it ends in virtual
time, if that is later. Requests are taken in order of their tags, so while two clients have requests waiting, the
tokens that they were admitted for, divided by their weights, differ by no more than one longest request of each.

Virtual time is the tag of the request admitted last, and at least the tokens admitted so far divided by the clients
that had something to do: a client that comes late starts there, so that it neither waits for others' backlogs nor is
paid for its absence, and a stream of clients seen for the first time passes nobody for ever.

Source: Goyal, Vin, Cheng, Start-time Fair Queuing, SIGCOMM 1996.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Level = tuple[int, int]  # (class, priority): fairness is among equals


@dataclass(slots=True)
class _Clients:
    """The clients of one level.

    Attributes:
      finish: where each client's last request ends in virtual time; absent: not after `virtual_time`.
      unfinished: requests of each client that has any.
    """

    virtual_time: float = 0.0
    finish: dict[str, float] = field(default_factory=dict)
    unfinished: dict[str, int] = field(default_factory=dict)
    sweep_at: int = 64


class FairShares:
    """Tags by level and client. Every method is O(1), amortised. Costs are tokens, divided by the client's weight."""

    def __init__(self) -> None:
        self._levels: dict[Level, _Clients] = {}

    def arrive(self, level: Level, client: str, cost: float) -> float:
        """The start tag of a request that arrives."""
        clients = self._levels.setdefault(level, _Clients())
        clients.unfinished[client] = clients.unfinished.get(client, 0) + 1
        tag = max(clients.virtual_time, clients.finish.get(client, 0.0))
        clients.finish[client] = tag + cost
        if len(clients.finish) >= clients.sweep_at:
            clients.finish = {c: f for c, f in clients.finish.items() if f > clients.virtual_time}
            clients.sweep_at = max(64, 2 * len(clients.finish))
        return tag

    def admitted(self, level: Level, tag: float, cost: float) -> None:
        """A request starts for the first time."""
        clients = self._levels[level]
        clients.virtual_time = max(tag, clients.virtual_time + cost / len(clients.unfinished))

    def ended(self, level: Level, client: str, unused: float) -> None:
        """A request ends, and `unused` of its cost was not used (negative: it took more), as when it is aborted.

        Later requests of the client start earlier for it; the tags of those waiting stay.
        """
        clients = self._levels[level]
        if client in clients.finish:
            clients.finish[client] -= unused
        clients.unfinished[client] -= 1
        if not clients.unfinished[client]:
            del clients.unfinished[client]
            if not clients.unfinished:
                del self._levels[level]  # all are equal again
