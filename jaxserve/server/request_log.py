"""A line in the log for every request that has ended."""

from __future__ import annotations

import logging
from typing import Any

from jaxserve.server.request_record import RequestRecord

logger = logging.getLogger("jaxserve.requests")

FIELDS = "fields"  # of a log record: what its message says, for a formatter that writes JSON


def log_request(record: RequestRecord) -> None:
    """As text, with the same in `record.fields`. Nothing in it was chosen freely by the client."""
    if not logger.isEnabledFor(logging.INFO):
        return
    fields = request_fields(record)
    words = [record.method, record.endpoint or "-", str(record.status)]
    words += [f"{name}={_word(value)}" for name, value in fields.items() if name not in _WORDLESS]
    logger.info("%s", " ".join(words), extra={FIELDS: fields})


_WORDLESS = ("method", "endpoint", "status")


def request_fields(record: RequestRecord) -> dict[str, Any]:
    """The names of a line's fields, and what they say. Seconds to the microsecond; None: there is nothing to say."""
    fields: dict[str, Any] = {
        "request_id": record.request_id,
        "key": record.key_name or None,
        "method": record.method,
        "endpoint": record.endpoint or None,
        "status": record.status,
        "error": record.error,
        "total_s": round(record.total_seconds, 6),
    }
    if record.prepared is not None:
        fields |= {
            "model": record.model,
            "stream": record.is_stream,
            "prompt_tokens": record.prompt_tokens,
            "cached_tokens": record.cached_tokens,
            "completion_tokens": record.completion_tokens,
            "queue_s": _rounded(record.queue_seconds),
            "ttft_s": _rounded(record.ttft_seconds),
            "finish_reason": ",".join(record.finish_reasons) or None,
        }
    return fields


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


def _word(value: Any) -> str:
    if value is None:
        return "-"
    return str(value).lower() if isinstance(value, bool) else str(value)
