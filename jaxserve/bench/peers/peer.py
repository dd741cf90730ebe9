"""Who is compared: servers named by URL, by command, or by the flags of our own `serve`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import ConfigError
from jaxserve.server_url import parse_server_url

PORT = "{port}"
OWN_NAME = "jaxserve"
_COMMAND, _OWN = "cmd:", "jaxserve:"


@dataclass(frozen=True, slots=True)
class Peer:
    """One server. Exactly one of `url` and `command` is there.

    Attributes:
      name: what the table calls it.
      url: of a server that runs already, without `/v1` and without a slash at the end.
      command: starts a server; a word holds `{port}`, which a free port replaces.
    """

    name: str
    url: str | None = None
    command: tuple[str, ...] | None = None

    def describe(self) -> str:
        """The URL, or the command with absolute paths cut to their last part."""
        return self.url if self.command is None else shlex.join(map(without_folders, self.command))  # type: ignore[return-value]


def parse_peer(text: str, *, model: str) -> Peer:
    """`NAME=http://HOST:PORT`, `NAME=cmd:COMMAND with {port}` or `NAME=jaxserve:FLAGS of serve`.

    Args:
      model: what our own server loads.

    Raises:
      ConfigError: one line that quotes `text`.
    """
    name, equals, how = text.partition("=")
    name = name.strip()
    if not equals or not name:
        raise ConfigError(f"--peer {text!r}: must be NAME=URL, NAME=cmd:COMMAND or NAME=jaxserve:FLAGS")
    try:
        if how.startswith(_OWN):
            return own_peer(name, model, shlex.split(how.removeprefix(_OWN)))
        if how.startswith(_COMMAND):
            command = tuple(shlex.split(how.removeprefix(_COMMAND)))
            if not any(PORT in word for word in command):
                raise ConfigError(f"--peer {text!r}: the command must say where {PORT} goes")
            return Peer(name, command=command)
    except ValueError as error:  # shlex: an open quotation mark
        raise ConfigError(f"--peer {text!r}: {error}") from error
    try:
        return Peer(name, url=parse_server_url(how))
    except ConfigError:
        raise ConfigError(f"--peer {text!r}: after '=' must come http://..., {_COMMAND} or {_OWN}") from None


def own_peer(name: str, model: str, flags: Sequence[str] = ()) -> Peer:
    """Our own server, out of the code and the environment that measure; no compilation goes on beside."""
    start = (sys.executable, "-m", "jaxserve", "serve", "--model", model, "--port", PORT)
    return Peer(name, command=(*start, "--wait-for-programs", *flags))


def choose_peers(texts: Sequence[str], *, model: str, with_own: bool) -> tuple[Peer, ...]:
    """All peers in the order of the command line; our own comes first unless one of them is it already.

    Raises:
      ConfigError: nobody is left, two have one name, or a text is malformed.
    """
    peers = [parse_peer(text, model=model) for text in texts]
    if with_own and not any(text.partition("=")[2].startswith(_OWN) for text in texts):
        peers.insert(0, own_peer(OWN_NAME, model))
    if not peers:
        raise ConfigError("nobody to measure: name a --peer")
    names = [peer.name for peer in peers]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--peer: two are called {name!r}")
    return tuple(peers)


def without_folders(word: str) -> str:
    """Absolute paths say more about a machine than about a measurement."""
    return Path(word).name if word.startswith("/") else word
