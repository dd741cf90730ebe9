"""How a request is served: its class, its place, whose share it takes, and the latencies it asks for.

Body fields `service_tier`, `priority`, `user`, `slo_ttft_ms` and `slo_itl_ms`; headers `X-SLO-TTFT-MS` and
`X-SLO-ITL-MS`; and the API key: nothing but a digest, of its name where it has one, goes any further.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.plain_numbers import parse_float
from jaxserve.request import ServiceClass, ServiceTargets
from jaxserve.scheduler.policy import CLASS_RANKS
from jaxserve.server.api_keys import sent_key
from jaxserve.server.worker_threads import Place

TTFT_HEADER = "X-SLO-TTFT-MS"
ITL_HEADER = "X-SLO-ITL-MS"
MAX_TARGET_MS = 86_400_000.0  # a day
# Tiers by the name that answers report; "auto" is "default".
_CLASSES = {
    "default": ServiceClass.INTERACTIVE,
    "priority": ServiceClass.INTERACTIVE,
    "flex": ServiceClass.BACKGROUND,
}
# More than any two `priority` fields can differ by: the tier comes first, the field decides within it.
_PRIORITY_TIER_LEAD = 2**32
_GLANCE_BYTES = 64 * 1024  # about 0.1 ms


class ServiceFields(Protocol):
    """A body's fields that this is about."""

    @property
    def service_tier(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...
    @property
    def user(self) -> str | None: ...
    @property
    def slo_ttft_ms(self) -> float | None: ...
    @property
    def slo_itl_ms(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Caller:
    """What an HTTP request says outside of its body.

    Attributes:
      identity: whose share of the engine it takes, before users are told apart: the name that this server knows its
        API key by, or the key as sent, where it has no keys; "" without either.
      targets: those of the headers.
    """

    identity: str = field(default="", repr=False)
    targets: ServiceTargets = field(default_factory=ServiceTargets)


@dataclass(frozen=True, slots=True)
class ServiceRules:
    """What a front door decides for all its requests.

    Attributes:
      interactive, background: targets, by class, of requests that name none.
      background_only: everything is background work, whatever its tier.
      client_secret: makes digests of API keys and users worthless to whoever reads them elsewhere.
    """

    interactive: ServiceTargets = field(default_factory=ServiceTargets)
    background: ServiceTargets = field(default_factory=ServiceTargets)
    background_only: bool = False
    client_secret: bytes = field(default=b"", repr=False)


@dataclass(frozen=True, slots=True)
class ServiceLevel:
    """The fields of `GenerationRequest` of these names, and the tier as the answer reports it (None: not asked)."""

    tier: str | None
    service_class: ServiceClass
    priority: int
    client: str
    targets: ServiceTargets


class _Glance(msgspec.Struct):
    """What of a body says whose turn it is."""

    service_tier: str | None = None
    priority: int | None = None
    user: str | None = None


def place_at_a_glance(data: bytes, caller: Caller) -> Place:
    """The place of a body that nobody has decoded yet, as far as that can be told quickly: what is large, or wrong,
    counts as what most are.
    """
    seen = _Glance()
    if len(data) <= _GLANCE_BYTES:
        with contextlib.suppress(msgspec.DecodeError, RecursionError):
            seen = msgspec.json.decode(data, type=_Glance)
    tier = seen.service_tier if seen.service_tier in _CLASSES else "default"
    rank = CLASS_RANKS[_CLASSES[tier]]
    priority = (seen.priority or 0) - (_PRIORITY_TIER_LEAD if tier == "priority" else 0)
    return Place((rank, priority), f"{caller.identity}\0{seen.user or ''}")


def read_caller(headers: Mapping[str, str], key_name: str = "") -> Caller:
    """Read an HTTP request's headers. Raises: InvalidRequestError: a target is none; `param` is the header's name.

    Args:
      key_name: the name that this server knows its API key by; "" where it has no keys.
    """
    return Caller(
        identity=key_name or sent_key(headers),
        targets=ServiceTargets(_header_seconds(headers, TTFT_HEADER), _header_seconds(headers, ITL_HEADER)),
    )


def service_level(body: ServiceFields, caller: Caller, rules: ServiceRules) -> ServiceLevel:
    """Decide how a request is served. Of the body's, the header's and the class's own target the first counts.

    Raises:
      InvalidRequestError: a field has no meaning; `param` is its name.
    """
    tier = "default" if body.service_tier in (None, "auto") else body.service_tier
    if tier not in _CLASSES:
        raise InvalidRequestError(
            f"service_tier must be one of auto, {', '.join(_CLASSES)}; got {body.service_tier!r}",
            param="service_tier",
        )
    if rules.background_only:
        if tier == "priority":
            raise InvalidRequestError("there is no service_tier 'priority' in a batch", param="service_tier")
        tier = "flex"
    service_class = _CLASSES[tier]
    own = rules.interactive if service_class is ServiceClass.INTERACTIVE else rules.background
    return ServiceLevel(
        tier=None if body.service_tier is None else tier,
        service_class=service_class,
        priority=_priority(body.priority) - (_PRIORITY_TIER_LEAD if tier == "priority" else 0),
        client=client_name(caller.identity, body.user or "", rules.client_secret),
        targets=ServiceTargets(
            ttft_seconds=_first(
                _body_seconds("slo_ttft_ms", body.slo_ttft_ms), caller.targets.ttft_seconds, own.ttft_seconds
            ),
            itl_seconds=_first(
                _body_seconds("slo_itl_ms", body.slo_itl_ms), caller.targets.itl_seconds, own.itl_seconds
            ),
        ),
    )


def client_name(identity: str, user: str, secret: bytes) -> str:
    """Who shares fairly with others: a digest of the key (or its name) and the user, "" without either.

    Args:
      secret: at most 64 bytes. Without it nobody can try keys against the digest.
    """
    if not identity and not user:
        return ""
    data = b"\0".join(text.encode("utf-8", "surrogatepass") for text in (identity, user))
    return hashlib.blake2b(data, digest_size=12, key=secret).hexdigest()


def _priority(value: int | None) -> int:
    priority = 0 if value is None else value
    if not -(2**31) <= priority < 2**31:
        raise InvalidRequestError(f"priority must fit 32 bits, got {priority}", param="priority")
    return priority


def _header_seconds(headers: Mapping[str, str], name: str) -> float | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        milliseconds = parse_float(text)
    except ValueError:
        raise InvalidRequestError(
            f"{name} must be a number of milliseconds, got {text[:40]!r}", param=name
        ) from None
    return _target_seconds(name, milliseconds)


def _body_seconds(name: str, value: float | None) -> float | None:
    return None if value is None else _target_seconds(name, value)


def _target_seconds(name: str, milliseconds: float) -> float:
    if not (math.isfinite(milliseconds) and 0 < milliseconds <= MAX_TARGET_MS):
        raise InvalidRequestError(
            f"{name} must be more than 0 and at most {MAX_TARGET_MS:.0f} milliseconds, got {milliseconds:g}",
            param=name,
        )
    return milliseconds / 1000


def _first(*values: float | None) -> float | None:
    return next((value for value in values if value is not None), None)
