"""Metrics with the model's name as a label, and perhaps one more."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from jaxserve.distribution import Distribution


class Families:
    """Makes them for one model. `value`: a number, or numbers by the value of `label`.

    Args:
      prefix: of every name; that of our own metrics, unless another is given.
      further: labels that all have besides the model's.
    """

    def __init__(
        self, model_name: str, prefix: str = "jaxserve:", further: Mapping[str, str] | None = None
    ) -> None:
        self._labels = {"model_name": model_name, **(further or {})}
        self._prefix = prefix

    def gauge(
        self, name: str, text: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        return self._family(GaugeMetricFamily, name, text, value, label)

    def counter(
        self, name: str, text: str, value: float | Mapping[str, float], label: str | None = None
    ) -> Metric:
        return self._family(CounterMetricFamily, name, text, value, label)

    def histogram(self, name: str, text: str, values: Distribution) -> Metric:
        family = HistogramMetricFamily(f"{self._prefix}{name}", text, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), values.cumulative(), values.total)
        return family

    def _family(
        self,
        kind: Callable[..., Metric],
        name: str,
        text: str,
        value: float | Mapping[str, float],
        label: str | None,
    ) -> Metric:
        labels = [*self._labels, *([] if label is None else [label])]
        family = kind(f"{self._prefix}{name}", text, labels=labels)
        fixed = list(self._labels.values())
        if isinstance(value, Mapping):
            for key, number in value.items():
                family.add_metric([*fixed, key], number)  # type: ignore[attr-defined]
        else:
            family.add_metric(fixed, value)  # type: ignore[attr-defined]
        return family


def vllm_families(model_name: str, prefix: str = "vllm:") -> Families:
    """With the labels that vLLM's metrics have; there is one engine."""
    return Families(model_name, prefix, {"engine": "0"})
