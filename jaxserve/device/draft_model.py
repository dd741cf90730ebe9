"""What drafts on the device, decided before anything is compiled."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from jaxserve.config import ModelConfig
from jaxserve.models.exit import ExitShape
from pallas_kernels.paged_attention import Backend


@dataclass(frozen=True, slots=True)
class DraftModel:
    """A model that guesses what the target will say.

    Attributes:
      model: its shape.
      is_own: it has weights of its own, and further layers of the KV cache. Otherwise it is the target's first layers
        below the target's own head, and lives in these layers' cache.
      attention: the backend that its attention runs on.
      max_tokens: most draft tokens of a row.
      exit: what stands above the target's first layers in the place of its head, if anything does.
    """

    model: ModelConfig
    is_own: bool
    attention: Backend
    max_tokens: int
    exit: ExitShape | None = None

    @property
    def cached(self) -> ModelConfig | None:
        """What has layers in the KV cache beside the target's."""
        return self.model if self.is_own else None


def first_layers(
    target: ModelConfig,
    num_layers: int,
    attention: Backend,
    max_tokens: int,
    exit_: ExitShape | None = None,
) -> DraftModel:
    """The target's own first layers as its draft.

    Args:
      attention: the target's.
      exit_: see `DraftModel`.
    """
    layers = dataclasses.replace(target, num_layers=num_layers)
    return DraftModel(layers, False, attention, max_tokens, exit_)
