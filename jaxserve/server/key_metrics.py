"""The part of `/metrics` that tells API keys apart, by their names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from jaxserve.server.metric_families import Families

if TYPE_CHECKING:
    from jaxserve.server.async_engine import OutputStream


class KeyUsage(Collector):
    """Counts what was done for each key. As many label values as the server has keys."""

    def __init__(self, model_name: str) -> None:
        self._families = Families(model_name)
        self._requests: Counter[str] = Counter()
        self._prompt_tokens: Counter[str] = Counter()
        self._generation_tokens: Counter[str] = Counter()

    def count(self, key_name: str, outputs: OutputStream) -> None:
        """An HTTP request of that key has ended, however it did."""
        self._requests[key_name] += 1
        self._prompt_tokens[key_name] += sum(len(request.prompt_token_ids) for request in outputs.requests)
        self._generation_tokens[key_name] += outputs.num_output_tokens

    def collect(self) -> Iterable[Metric]:
        counter = self._families.counter
        yield counter("key_requests", "HTTP requests that reached the engine.", self._requests, "key")
        yield counter("key_prompt_tokens", "Tokens of their prompts.", self._prompt_tokens, "key")
        yield counter("key_generation_tokens", "Tokens generated for them.", self._generation_tokens, "key")
