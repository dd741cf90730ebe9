"""Metrics with the model's name as a label, and perhaps one more."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric


class Families:
    """Makes them for one model. `value`: a number, or numbers by the value of `label`.

    Args:
      prefix: of every name; that of our own metrics, unless another is given.
    """

    def __init__(self, model_name: str, prefix: str = "jaxserve:") -> None:
        self._model = model_name
        self._prefix = prefix

    def gauge(
        self, name: str, text: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        return self._family(GaugeMetricFamily, name, text, value, label)

    def counter(
        self, name: str, text: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        return self._family(CounterMetricFamily, name, text, value, label)

    def _family(
        self,
        kind: Callable[..., Metric],
        name: str,
        text: str,
        value: float | Mapping[str, float],
        label: str | None,
    ) -> Metric:
        labels = ["model_name"] if label is None else ["model_name", label]
        family = kind(f"{self._prefix}{name}", text, labels=labels)
        if isinstance(value, Mapping):
            for key, number in value.items():
                family.add_metric([self._model, key], number)  # type: ignore[attr-defined]
        else:
            family.add_metric([self._model], value)  # type: ignore[attr-defined]
        return family
