"""Where a server is, as people write it."""

from __future__ import annotations

from urllib.parse import urlsplit

from jaxserve.errors import ConfigError


def parse_server_url(text: str) -> str:
    """What paths are appended to: `http(s)://HOST[:PORT]`, written with or without `/v1`.

    Raises:
      ConfigError: it is none.
    """
    try:
        parts = urlsplit(text)
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, or too large; half an IPv6 address
        is_usable = False
    if not is_usable:
        raise ConfigError(f"{text!r} is not the URL of a server: http://HOST:PORT")
    return text.rstrip("/").removesuffix("/v1")
