"""What one run says: goodput, latencies and refusals by class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.bench.peers.answer import Answer, Fault
from jaxserve.bench.peers.figures import percentile
from jaxserve.request import ServiceClass, ServiceTargets
from jaxserve.workload.traced_request import TracedRequest


@dataclass(frozen=True, slots=True)
class ClassOutcome:
    """Of the requests of one class. Times in seconds; None where no request had what is measured.

    Attributes:
      sent, whole, refused, failed: requests; the last three add up to the first.
      good: whole, and within the targets (time to first token, and mean time between tokens).
      in_time: whole by the time that the last request was sent.
      ttft_p50, ttft_p99, ttft_most: of those that were not refused.
      itl_p99: between chunks of text.
      refusal_p99: from sending a request to learning that it is refused.
    """

    sent: int
    whole: int
    refused: int
    failed: int
    good: int
    in_time: int
    ttft_p50: float | None
    ttft_p99: float | None
    ttft_most: float | None
    itl_p99: float | None
    refusal_p99: float | None


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run.

    Attributes:
      offered: requests a second.
      seconds: during which they came.
      output_throughput: output tokens a second, until the last answer ended.
      counts: what the server's metrics counted during the run, by name and labels.
    """

    offered: float
    seconds: float
    output_throughput: float
    interactive: ClassOutcome
    background: ClassOutcome
    counts: dict[str, float]

    @property
    def goodput(self) -> float:
        """Interactive requests within their targets, a second."""
        return self.interactive.good / self.seconds


def outcome_of(
    items: Sequence[TracedRequest],
    answers: Sequence[Answer],
    targets: ServiceTargets,
    counts: dict[str, float],
) -> Outcome:
    """Sum a run up.

    Args:
      targets: that goodput is counted by, whatever the requests said.
    """
    seconds = max(answer.sent for answer in answers)
    until_end = max(answer.ended for answer in answers)
    by_class = {kind: [] for kind in ServiceClass}  # type: dict[ServiceClass, list[Answer]]
    for item, answer in zip(items, answers, strict=True):
        by_class[item.service_class].append(answer)
    return Outcome(
        offered=len(items) / seconds,
        seconds=seconds,
        output_throughput=sum(answer.output_tokens for answer in answers) / until_end,
        interactive=_of_class(by_class[ServiceClass.INTERACTIVE], targets, seconds),
        background=_of_class(by_class[ServiceClass.BACKGROUND], ServiceTargets(), seconds),
        counts=counts,
    )


def _of_class(answers: Sequence[Answer], targets: ServiceTargets, seconds: float) -> ClassOutcome:
    whole = [answer for answer in answers if answer.fault is None]
    refused = [answer for answer in answers if answer.fault is Fault.REFUSED]
    ttft = [value for answer in answers if (value := answer.ttft) is not None]
    gaps = [gap for answer in answers for gap in answer.gaps]
    return ClassOutcome(
        sent=len(answers),
        whole=len(whole),
        refused=len(refused),
        failed=len(answers) - len(whole) - len(refused),
        good=sum(_is_good(answer, targets) for answer in whole),
        in_time=sum(answer.ended <= seconds for answer in whole),
        ttft_p50=percentile(ttft, 50),
        ttft_p99=percentile(ttft, 99),
        ttft_most=max(ttft, default=None),
        itl_p99=percentile(gaps, 99),
        refusal_p99=percentile([answer.ended - answer.sent for answer in refused], 99),
    )


def _is_good(answer: Answer, targets: ServiceTargets) -> bool:
    return answer.ttft is not None and targets.met_by(answer.ttft, answer.tpot)
