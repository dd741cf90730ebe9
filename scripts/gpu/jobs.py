"""Jobs, cases and their outcomes: plain data that parent and worker processes exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

Case = Mapping[str, Any]  # "name", "kind", and what the kind's function wants; JSON holds it

OK = "ok"
WRONG = "wrong"  # CheckFailedError: there is a result, and it is not what it must be
FAILED = "failed"  # another exception
DIED = "died"  # the process ended while it ran
HUNG = "hung"
REFUSED = "refused"  # NotImplementedError: a clear no
LEFT_OUT = "left out"  # a package is missing
NOT_RUN = "not run"  # no time was left


class CheckFailedError(Exception):
    """A result is not what it must be."""


@dataclass(frozen=True)
class Job:
    """Cases that one worker process runs in turn.

    Attributes:
      name: shown in reports.
      section: the part of the report it belongs to.
      cases: their order is their priority.
      budget_s: wall time of all cases together.
      stall_s: longest that one case may take; the process's start counts towards its first.
      environment: variables of the worker, on top of the parent's.
      is_check: a case without a result (none that was refused, left out or out of time) makes the whole run fail, as a
        wrong result does in any job.
    """

    name: str
    section: str
    cases: Sequence[Case]
    budget_s: float
    stall_s: float = 90.0
    environment: Mapping[str, str] = field(default_factory=dict)
    is_check: bool = False


@dataclass(frozen=True)
class Outcome:
    """What became of a case.

    Attributes:
      case: the case itself.
      status: one of the names above.
      data: what its function returned.
      note: why it is not OK, in a line or two.
      seconds: wall time, compilation included.
      is_check: see `Job`.
    """

    section: str
    job: str
    case: Case
    status: str
    data: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    seconds: float = 0.0
    is_check: bool = False

    @property
    def name(self) -> str:
        return str(self.case["name"])

    @property
    def fails_the_run(self) -> bool:
        return self.status == WRONG or (self.is_check and self.status in (FAILED, DIED, HUNG))

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, **asdict(self)}
