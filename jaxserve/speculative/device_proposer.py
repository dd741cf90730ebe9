"""Drafts from a model on the device: the target's own first layers, or a smaller model. See `device.draft`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.builder import BatchBuilder, HostBatch
from jaxserve.scheduler.output import DraftRequest


class DraftRunner(Protocol):
    """What this needs of `device.model_runner.ModelRunner`."""

    def can_draft(self, bucket: Bucket) -> bool: ...
    def draft(self, batch: HostBatch, lengths: Sequence[int]) -> np.ndarray: ...


class DeviceProposer:
    """Has the runner draft for all requests in one batch.

    Args:
      builder: that of the engine's steps, which knows block tables and sampling settings.
    """

    uses_device = True

    def __init__(self, runner: DraftRunner, builder: BatchBuilder) -> None:
        self._runner = runner
        self._builder = builder

    def propose(self, wanted: Sequence[DraftRequest]) -> list[tuple[int, ...]]:
        """Nothing for anybody while the programs for so many rows are still being made."""
        batch, lengths = self._builder.build_for_drafts(wanted)
        if batch is None or not self._runner.can_draft(batch.bucket):
            return [()] * len(wanted)
        drafts = self._runner.draft(batch, lengths)
        drafted = {
            row.request_id: tuple(tokens[:length].tolist())
            for row, tokens, length in zip(batch.rows, drafts, lengths, strict=True)
        }
        return [drafted.get(item.request.request_id, ()) for item in wanted]

    def forget(self, request_id: str) -> None:
        """It keeps nothing of a request: the draft's cache goes with the request's blocks."""
