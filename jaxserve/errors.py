"""Every error that a caller of jaxserve may want to catch by name."""

from __future__ import annotations


class JaxserveError(Exception):
    """Base of all errors raised on purpose. Its text is one line that a person can act on."""


class InvalidRequestError(JaxserveError, ValueError):
    """A request that can't be honoured as asked; raised before it reaches the scheduler.

    Attributes:
      param: name of the offending parameter as the client wrote it, or None when no single one is at fault.
      code: short machine-readable reason, e.g. ``"context_length_exceeded"``, or None.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class CheckpointError(JaxserveError):
    """A model on disk that can't be used; the text names the file and the fault."""


class ConfigError(JaxserveError, ValueError):
    """Engine options that contradict each other, the model or the machine."""


class OverloadedError(JaxserveError):
    """There is more work than the engine can do in time; nothing is wrong with the request (HTTP 429).

    Attributes:
      reason: short and machine-readable: "queue_full", "queue_tokens_full", "ttft_target", ...
      retry_after_seconds: when it may be worth another try; None where nothing is known; infinite where none is: not
        even an idle engine could do it.
    """

    def __init__(self, message: str, *, reason: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.retry_after_seconds = retry_after_seconds


class QueueFullError(OverloadedError):
    """The waiting queue is at its limit."""

    def __init__(
        self, message: str, *, reason: str = "queue_full", retry_after_seconds: float | None = None
    ) -> None:
        super().__init__(message, reason=reason, retry_after_seconds=retry_after_seconds)


class GenerationError(JaxserveError):
    """The engine goes on, but could not finish a request."""


class EngineDeadError(JaxserveError):
    """The engine has stopped (a step failed, or it was closed); it accepts nothing any more."""
