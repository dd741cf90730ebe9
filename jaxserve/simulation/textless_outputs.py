"""Outputs without text, logprobs or stop strings: simulated tokens mean nothing, and text is a third of the work."""

from __future__ import annotations

from collections.abc import Sequence

from jaxserve.outputs import RequestOutput, RequestUpdate
from jaxserve.request import Request


class TextlessOutputs:
    """In the place of `output_processor.OutputProcessor`."""

    def __init__(self) -> None:
        # Tokens of unfinished requests that get one output, at their end.
        self._held: dict[str, list[int]] = {}

    def add(self, request: Request, stream: bool = True) -> None:
        """See `OutputProcessor.add`."""
        if not stream:
            self._held[request.request_id] = []

    def process(
        self, updates: Sequence[RequestUpdate]
    ) -> tuple[list[RequestOutput], list[tuple[RequestUpdate, int, str]]]:
        """See `OutputProcessor.process`."""
        outputs = []
        for update in updates:
            request, token_ids = update.request, update.new_token_ids
            held = self._held.get(request.request_id)
            if held is not None:
                held += token_ids
                if request.finish_reason is None:
                    continue
                token_ids = self._held.pop(request.request_id)
            elif not token_ids and request.finish_reason is None:
                continue
            outputs.append(
                RequestOutput(
                    request_id=request.group_id,
                    index=request.index,
                    text="",
                    token_ids=token_ids,
                    logprobs=None,
                    finish_reason=request.finish_reason,
                    stop_reason=request.stop_reason,
                    num_prompt_tokens=len(request.prompt_token_ids),
                    num_cached_tokens=request.num_cached_tokens or 0,
                    num_output_tokens=len(request.output_token_ids),
                    error=update.error,
                )
            )
        return outputs, []
