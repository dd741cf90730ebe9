"""What the rows of coming batches need, kept by slot in numpy: written when a request starts, gathered every step.

So a step costs the host a few array operations, however many sequences run and however long their block tables are.
"""

from __future__ import annotations

import numpy as np

from jaxserve.batch.flags import BatchFlag, RowFlag
from jaxserve.batch.layout import ROW_SETTINGS
from jaxserve.request import Request, SamplingParams
from jaxserve.scheduler.output import ScheduledRequest

_HIDDEN_FOR = {"mean": BatchFlag.HIDDEN, "last": BatchFlag.LAST_HIDDEN}
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "repetition_penalty": 1.0}


class RowTable:
    """One row for each slot, and the last one for padding, which never changes.

    Attributes:
      block_tables_RB: int32; 0 past a table's end.
      settings_FR: int32 [ROW_SETTINGS, R]; floats as their bits.
      flags_R: int32, the bits of `RowFlag` that hold for every sample of the request.
      banned_until_R: int32, length of the sequence from which on stops are allowed; 0 bans none.
      scored_until_R: int32, prompt positions below this one tell the logprob of the next; 0 where none are wanted.
      logprobs_R: bool, logprobs of sampled tokens are wanted.
      pooling_R: int32, the bit of `BatchFlag` for what an embedding is pooled of; 0 where none is wanted.
    """

    def __init__(self, num_rows: int, blocks: int) -> None:
        """Args: num_rows: R, blocks: B."""
        self.block_tables_RB = np.zeros((num_rows, blocks), np.int32)
        self.settings_FR = np.zeros((len(ROW_SETTINGS), num_rows), np.int32)
        self.flags_R = np.zeros(num_rows, np.int32)
        self.banned_until_R = np.zeros(num_rows, np.int32)
        self.scored_until_R = np.zeros(num_rows, np.int32)
        self.logprobs_R = np.zeros(num_rows, bool)
        self.pooling_R = np.zeros(num_rows, np.int32)
        self._num_blocks = [0] * num_rows
        self.settings_FR[:] = _settings(0, _DEFAULTS)[:, None]

    def update(self, row: ScheduledRequest) -> None:
        """Take in a row that is new, or whose block table has grown."""
        if row.is_new:
            self._load(row.slot, row.request)
        start = self._num_blocks[row.slot]
        end = self._num_blocks[row.slot] = start + len(row.new_block_ids)
        self.block_tables_RB[row.slot, start:end] = row.new_block_ids

    def num_blocks(self, slot: int) -> int:
        """Length of a row's table."""
        return self._num_blocks[slot]

    def _load(self, slot: int, request: Request) -> None:
        params = request.params
        self.block_tables_RB[slot] = 0
        self._num_blocks[slot] = 0
        settings = {name: getattr(params, name) for name in _PARAMS}
        if params.is_greedy:
            settings["temperature"] = 1.0  # unused, but where rows are drawn together all are divided by it
        self.settings_FR[:, slot] = _settings(request.seed, settings)
        self.flags_R[slot] = int(_flags(params))
        bans = params.min_tokens if request.stop_token_ids else 0
        self.banned_until_R[slot] = request.num_prompt_tokens + bans if bans else 0
        scores = params.prompt_logprobs is not None and request.index == 0
        self.scored_until_R[slot] = request.num_prompt_tokens - 1 if scores else 0
        self.logprobs_R[slot] = params.logprobs is not None
        self.pooling_R[slot] = 0 if params.pooling is None else int(_HIDDEN_FOR[params.pooling])


def has_penalties(params: SamplingParams) -> bool:
    return params.presence_penalty != 0 or params.frequency_penalty != 0 or params.repetition_penalty != 1


def needs_state_row(request: Request) -> bool:
    """Whether the request's row of device state (token counts, bias, stop ids) is ever read."""
    params = request.params
    return has_penalties(params) or bool(params.logit_bias) or params.min_tokens > 0


_PARAMS = tuple(field.name for field in ROW_SETTINGS if not field.name.startswith("seed"))


def _flags(params: SamplingParams) -> RowFlag:
    flags = RowFlag.SAMPLE
    if not params.is_greedy:
        flags |= RowFlag.RANDOM
    if has_penalties(params):
        flags |= RowFlag.PENALTIES
    if params.logit_bias:
        flags |= RowFlag.LOGIT_BIAS
    if params.grammar is not None:
        flags |= RowFlag.MASK
    return flags


def _settings(seed: int, params: dict[str, float]) -> np.ndarray:
    """The int32 column of a request: [ROW_SETTINGS]."""
    words = {"seed_low": seed & 0xFFFFFFFF, "seed_high": (seed >> 32) & 0xFFFFFFFF}
    column = np.zeros(len(ROW_SETTINGS), np.int32)
    for at, field in enumerate(ROW_SETTINGS):
        if field.name in words:
            column.view(np.uint32)[at] = words[field.name]
        elif field.is_float:
            column.view(np.float32)[at] = params.get(field.name, 0.0)
        else:
            column[at] = params.get(field.name, 0)
    return column
