"""A copy engine whose "model" says what it was told to, and then ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jaxserve.request import Request
from tests.server.copy_engine import CopyEngine

END = 2  # <|im_end|>


@dataclass
class ScriptedEngine(CopyEngine):
    """Attributes:
    scripts: what choices say; the last one is that of all further choices.
    params: of the latest request.
    prompt: its text.
    """

    scripts: tuple[str, ...] = ("",)
    eos_token_ids: frozenset[int] = frozenset({END})
    params: Any = None
    prompt: str = ""
    _tokens: dict[str, list[int]] = field(default_factory=dict)

    def submit(self, request: Any) -> None:
        self.params = request.params
        self.prompt = self.tokenizer.decode(request.prompt_token_ids, skip_special_tokens=False)
        super().submit(request)

    def next_token(self, request: Request) -> int:
        script = self.scripts[min(request.index, len(self.scripts) - 1)]
        if script not in self._tokens:
            self._tokens[script] = self.tokenizer.encode(script, add_special_tokens=False)
        tokens = self._tokens[script]
        return tokens[request.num_output_tokens] if request.num_output_tokens < len(tokens) else END
