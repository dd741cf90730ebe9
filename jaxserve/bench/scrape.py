"""What a server's `/metrics` say at a moment."""

from __future__ import annotations

import urllib.request

from prometheus_client.parser import text_string_to_metric_families


def scrape(url: str, *kinds: str) -> dict[str, float]:
    """Metrics of the given kinds ("counter", "gauge"), as `name[values of their labels but the model's]`.

    Args:
      url: of the server.
    """
    with urllib.request.urlopen(f"{url}/metrics") as response:
        text = response.read().decode()
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type in kinds:
            for sample in family.samples:
                labels = ",".join(v for k, v in sorted(sample.labels.items()) if k != "model_name")
                found[f"{family.name}{f'[{labels}]' if labels else ''}"] = sample.value
    return found
