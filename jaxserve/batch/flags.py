"""Bits that tell the compiled step which of its optional parts a row or a batch needs."""

from __future__ import annotations

import enum


class RowFlag(enum.IntFlag):
    """Of one row of logits."""

    SAMPLE = 1  # a token is wanted (a prefill chunk that does not reach the last token wants none)
    RANDOM = 2  # temperature > 0
    PENALTIES = 4
    LOGIT_BIAS = 8
    BAN_STOPS = 16  # min_tokens not reached: tokens that would end the request are out of the question
    MASK = 64  # only tokens that the row's mask allows
    CONTINUES = 32  # its one token is the one sampled last for its row of state: the batch does not have it


class BatchFlag(enum.IntFlag):
    """Of the whole step: set when any row needs the part, so that the others cost nothing."""

    RANDOM = 1
    PROCESS_LOGITS = 2  # penalties, bias or banned stops
    LOGPROBS = 4
    PROMPT_LOGPROBS = 8
    MASK = 16
    # Nothing that the device does depends on these: hidden states are there, and read only when somebody wants them.
    HIDDEN = 32  # of all tokens
    LAST_HIDDEN = 64  # of each row's last token
