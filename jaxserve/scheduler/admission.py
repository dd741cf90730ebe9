"""Limits on who gets in: the length of the queue, and the KV blocks that a request needs to start."""

from __future__ import annotations

from jaxserve.config import ResolvedConfig
from jaxserve.errors import InvalidRequestError, QueueFullError
from jaxserve.request import Request


def final_num_computed_tokens(request: Request) -> int:
    """KV entries that the request has when it is as long as it may get: the last token it samples is never computed."""
    return max(request.num_prompt_tokens, request.num_prompt_tokens + request.max_tokens - 1)


def tokens_to_start(request: Request) -> int:
    """KV entries to have room for on admission: all known tokens, and one more where there can be one.

    All of them, and not the first chunk's: otherwise several long prompts get in, evict one another, and begin
    again in a circle.
    """
    return min(request.num_tokens + 1, final_num_computed_tokens(request))


def check_queue(num_new: int, num_waiting: int, num_running: int, config: ResolvedConfig) -> None:
    """All sequences of a request, or none. Those that free slots can take are not counted as waiting.

    Raises:
      QueueFullError: the queue is at its limit.
    """
    unfinished, most = num_waiting + num_running, config.max_waiting + config.max_num_seqs
    if unfinished + num_new > most:
        raise QueueFullError(
            f"the waiting queue is full ({config.max_waiting} sequences): {unfinished} sequences run or wait already, "
            f"at most {most}; try again later"
        )


def check_queued_tokens(num_new: int, num_waiting: int, config: ResolvedConfig) -> None:
    """An empty queue takes any request.

    Args:
      num_new, num_waiting: tokens to compute before the next output token.

    Raises:
      QueueFullError: the queue is at its limit of tokens.
    """
    most = config.max_waiting_tokens
    if most is not None and num_waiting and num_waiting + num_new > most:
        raise QueueFullError(
            f"requests of {num_waiting} tokens wait already, at most {most}, and this one has {num_new}; "
            "try again later",
            reason="queue_tokens_full",
        )


def check_fits_pool(request: Request, num_blocks: int, block_size: int) -> None:
    """Refuse what could never run, even alone: it would block the head of the queue for ever.

    Raises:
      InvalidRequestError: the request at its longest is bigger than the whole pool.
    """
    capacity = num_blocks * block_size
    if final_num_computed_tokens(request) > capacity:
        raise InvalidRequestError(
            f"{request.num_prompt_tokens} prompt tokens and up to {request.max_tokens} output tokens do not fit "
            f"the KV cache of {capacity} tokens",
            code="context_length_exceeded",
        )
