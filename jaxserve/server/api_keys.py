"""API keys: several, each with a name that fairness and metrics use in the key's place."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxserve.errors import ConfigError

logger = logging.getLogger(__name__)

DEFAULT_KEY_NAME = "default"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}", re.ASCII)
_LINE = re.compile(r"(?P<name>[^\s:]+):\s*(?P<key>\S.*)")


@dataclass(frozen=True)
class ApiKeys:
    """The keys that open a server; none at all leaves it open. Keeps only keyed digests of them.

    Attributes:
      names: by digest.
      salt: of the digests; made anew in every process.
    """

    names: Mapping[bytes, str] = field(default_factory=dict, repr=False)
    salt: bytes = field(default=b"", repr=False)

    def __bool__(self) -> bool:
        return bool(self.names)

    def name_of(self, key: str) -> str | None:
        """The name of a key that a client sent, or None.

        Takes the same time whichever of the keys it resembles, and however far.
        """
        given = _digest(key, self.salt)
        found = None
        for digest, name in self.names.items():
            if hmac.compare_digest(given, digest):
                found = name
        return found


def make_api_keys(named: Iterable[tuple[str, str]]) -> ApiKeys:
    """Keys from (name, key) pairs. Raises: ConfigError: a key or a name comes twice."""
    salt = secrets.token_bytes(32)
    names: dict[bytes, str] = {}
    for name, key in named:
        digest = _digest(key, salt)
        if digest in names:
            raise ConfigError(f"the API keys {names[digest]!r} and {name!r} are the same key")
        if name in names.values():
            raise ConfigError(f"there are two API keys called {name!r}")
        names[digest] = name
    return ApiKeys(names, salt)


def read_key_file(path: Path) -> list[tuple[str, str]]:
    """(name, key) pairs of a file with a line `NAME: KEY` each; empty lines and lines with `#` first are skipped.

    Raises:
      ConfigError: it can't be read, holds no key, or has a line of another form. Keys are never shown.
    """
    try:
        text = path.read_text("utf-8")
        mode = path.stat().st_mode
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"can't read the API keys in {path}: {error}") from None
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning("other users of this machine can read the API keys in %s", path)
    named = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        if match is None or not _NAME.fullmatch(match["name"]):
            raise ConfigError(
                f"{path}, line {number}: expected NAME: KEY, with a name of letters, digits, '.', '_' and '-'"
            )
        named.append((match["name"], match["key"]))
    if not named:
        raise ConfigError(f"there is no API key in {path}")
    return named


def sent_key(headers: Mapping[str, str]) -> str:
    """The key that a request brings, "" without one.

    It stands in `Authorization: Bearer KEY` or, from Anthropic's clients, in `X-Api-Key`. The scheme's name is
    case-insensitive (RFC 9110, 11.1).
    """
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else headers.get("X-Api-Key", "")


def _digest(key: str, salt: bytes) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogateescape"), key=salt).digest()
