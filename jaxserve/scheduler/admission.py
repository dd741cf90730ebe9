"""Limits on who gets in: the length of the queue, and the KV blocks that a request needs to start."""

from __future__ import annotations

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


def check_queue(num_waiting: int, max_waiting: int, num_free_slots: int) -> None:
    """Requests that the next step can start are not counted as waiting.

    Raises:
      QueueFullError: the queue is at its limit.
    """
    if num_waiting >= max_waiting + num_free_slots:
        raise QueueFullError(f"the waiting queue is full ({max_waiting} sequences); try again later")


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
