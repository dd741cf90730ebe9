"""The comparison: which server runs when, and what is kept of each pass."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxserve.bench.peers.answer import Answer, read_answer
from jaxserve.bench.peers.client import arrival_times, replay
from jaxserve.bench.peers.figures import Figures, figures_of
from jaxserve.bench.peers.peer import Peer
from jaxserve.bench.peers.process import running
from jaxserve.bench.peers.ready import Identity, NotReadyError, wait_until_ready
from jaxserve.workload.traced_request import TracedRequest, Workload

_READY_TIMEOUT_OF_A_URL_S = 10.0
_DYING_S = 1.0


@dataclass(frozen=True, slots=True)
class Load:
    """How the requests come.

    Attributes:
      rate: requests a second of a Poisson process; None is all at once.
      seed: of its gaps; the same for every peer and pass.
      idle_timeout_s: a request that gets nothing for so long is given up.
      ready_timeout_s: so long a command may take until its server answers.
    """

    rate: float | None = None
    seed: int = 0
    idle_timeout_s: float = 600.0
    ready_timeout_s: float = 900.0

    def describe(self) -> str:
        return (
            "all at once"
            if self.rate is None
            else f"Poisson arrivals, {self.rate:g} a second, seed {self.seed}"
        )


@dataclass(frozen=True, slots=True)
class Pass:
    """One run of the workload, or the failure to run it.

    Attributes:
      time_to_ready: seconds from starting the command to its first answer; None for a URL, or if none came.
      answers: in the workload's order; empty if the server never became ready.
      failure: what went wrong with the server itself.
    """

    time_to_ready: float | None
    identity: Identity | None
    answers: tuple[Answer, ...]
    failure: str | None = None

    @property
    def figures(self) -> Figures | None:
        return figures_of(self.answers) if self.answers else None

    @property
    def is_whole(self) -> bool:
        """Whether the server ran and every answer was as ordered."""
        return self.failure is None and all(answer.fault is None for answer in self.answers)


@dataclass(frozen=True, slots=True)
class PeerResult:
    """All passes of one peer, in order."""

    peer: Peer
    passes: tuple[Pass, ...]

    def median(self, value: Callable[[Figures], float | None]) -> float | None:
        """Over the passes that have it."""
        values = [value(one.figures) for one in self.passes if one.figures is not None]
        return median_or_none(values)

    @property
    def time_to_ready(self) -> float | None:
        """The median, seconds."""
        return median_or_none([one.time_to_ready for one in self.passes])

    @property
    def is_whole(self) -> bool:
        return all(one.is_whole for one in self.passes)


@dataclass(frozen=True, slots=True)
class Comparison:
    workload: Workload
    load: Load
    results: tuple[PeerResult, ...]


def compare(
    peers: Sequence[Peer],
    workload: Workload,
    load: Load,
    *,
    repeats: int = 1,
    announce: Callable[[str], None] = lambda line: None,
) -> Comparison:
    """Run `workload` against every peer in turn (A B A B), `repeats` times.

    A command is started for its pass and ended after it, so nobody else's server takes its cores or memory, and no pass
    finds its prompts in a prefix cache that an earlier one filled. A server named by URL lives on, and may.

    Args:
      announce: told a line before and after every pass.

    Raises:
      ConfigError: a command can't be run at all.
    """
    passes: dict[str, list[Pass]] = {peer.name: [] for peer in peers}
    for repeat in range(repeats):
        for peer in peers:
            where = f"pass {repeat + 1} of {repeats}, {peer.name}"
            announce(f"{where}: starting" if peer.command else f"{where}: {peer.url}")
            one = measure(peer, workload, load)
            passes[peer.name].append(one)
            announce(f"{where}: {_summary(one)}")
    return Comparison(workload, load, tuple(PeerResult(peer, tuple(passes[peer.name])) for peer in peers))


def measure(peer: Peer, workload: Workload, load: Load) -> Pass:
    """Start the peer if need be, warm it up, run the workload, and end what was started."""
    arrivals = arrival_times(len(workload.requests), rate=load.rate, seed=load.seed)
    started = time.perf_counter()
    with running(peer) as server:
        try:
            timeout = load.ready_timeout_s
            if peer.command is None:
                timeout = min(timeout, _READY_TIMEOUT_OF_A_URL_S)
            identity = wait_until_ready(server, timeout_s=timeout)
        except NotReadyError as error:
            return Pass(None, None, (), str(error))
        ready = time.perf_counter() - started if peer.command else None
        warm_up = warm_up_items(workload)
        replay(server.url, identity.model, warm_up, (0.0,) * len(warm_up), idle_timeout_s=load.idle_timeout_s)
        exchanges = replay(
            server.url, identity.model, workload.requests, arrivals, idle_timeout_s=load.idle_timeout_s
        )
        answers = tuple(map(read_answer, workload.requests, exchanges))
        # Connections close before a dying process has ended.
        all_whole = all(answer.fault is None for answer in answers)
        code = server.exit_code(grace_s=0.0 if all_whole else _DYING_S)
        failure = None
        if code is not None:
            failure = f"ended with exit code {code} while it was measured: {server.last_words()}"
    return Pass(ready, identity, answers, failure)


def warm_up_items(workload: Workload) -> tuple[TracedRequest, ...]:
    """A few short requests, of prompts read backwards: a prefix cache must not know the measured ones."""
    return tuple(
        TracedRequest(item.prompt_token_ids[:-33:-1], min(item.max_tokens, 8))
        for item in workload.requests[:4]
    )


def median_or_none(values: Sequence[float | None]) -> float | None:
    """The median of those that are there."""
    there = [value for value in values if value is not None]
    return statistics.median(there) if there else None


def _summary(one: Pass) -> str:
    figures = one.figures
    if figures is None:
        return f"failed: {one.failure}"
    text = f"{figures.seconds:.1f} s, {figures.output_throughput:.1f} output tokens/s"
    if one.time_to_ready is not None:
        text = f"ready after {one.time_to_ready:.1f} s, {text}"
    if not one.is_whole:
        text += f", {figures.whole} of {figures.requests} answers whole"
    return text
