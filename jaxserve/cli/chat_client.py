"""A streaming client of the chat endpoint, with the standard library alone."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from jaxserve.cli.chat_session import ChatSettings, Message
from jaxserve.cli.server_url import BROKEN, open_url, server_base
from jaxserve.errors import ConfigError, JaxserveError

_CONNECT_TIMEOUT_S = 10.0
_SILENCE_TIMEOUT_S = 600.0  # between two pieces of an answer; a busy server may queue us for long


@dataclass(frozen=True, slots=True)
class ServerAnswerer:
    """Answers with an OpenAI-compatible server.

    Attributes:
      base_url: scheme, host and port, without `/v1`.
      model: the name the server knows its model by.
    """

    base_url: str
    model: str
    api_key: str | None = None

    @classmethod
    def connect(cls, url: str, *, model: str | None = None, api_key: str | None = None) -> ServerAnswerer:
        """Ask the server for its models.

        Args:
          url: with or without `/v1` at the end.
          model: one of the server's models; None takes its first.

        Raises:
          ConfigError: `url` is none, nobody answers there, or the model isn't among those offered.
        """
        base_url = server_base(url)
        with open_url(base_url + "/v1/models", api_key, timeout_s=_CONNECT_TIMEOUT_S) as response:
            try:
                offered = [entry["id"] for entry in json.load(response)["data"]]
            except (*BROKEN, KeyError, TypeError):
                raise ConfigError(
                    f"{base_url}/v1/models: not the answer of an OpenAI-compatible server"
                ) from None
        if not offered:
            raise ConfigError(f"{base_url}: the server offers no model")
        if model is not None and model not in offered:
            raise ConfigError(f"{base_url}: the server has no model {model!r}, only {', '.join(offered)}")
        return cls(base_url=base_url, model=model or offered[0], api_key=api_key)

    def stream(self, messages: list[Message], settings: ChatSettings) -> Generator[str]:
        """The answer's text as it comes. Closing the generator hangs up, which ends the answer on the server too.

        Raises:
          InvalidRequestError: the server refuses this conversation.
          JaxserveError: it failed, or hung up before the answer had ended.
        """
        body = {"model": self.model, "messages": messages, "stream": True, **settings.as_fields()}
        url = self.base_url + "/v1/chat/completions"
        with open_url(url, self.api_key, timeout_s=_SILENCE_TIMEOUT_S, body=body) as response:
            try:
                for line in response:
                    if not line.startswith(b"data:"):
                        continue
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield from _texts(json.loads(data))
            except BROKEN as error:
                raise JaxserveError(f"{self.base_url}: the answer broke off: {error}") from error
        raise JaxserveError(f"{self.base_url}: the server hung up before the answer had ended")


def _texts(chunk: dict[str, Any]) -> Iterator[str]:
    if "error" in chunk:
        raise JaxserveError(f"the server reports: {chunk['error'].get('message')}")
    for choice in chunk.get("choices", []):
        text = choice.get("delta", {}).get("content")
        if text:
            yield text
