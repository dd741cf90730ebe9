"""An answer as a row of blocks, each a text or a tool call, for endpoints that word it so."""

from __future__ import annotations

from dataclasses import dataclass, field

from jaxserve.server.responses import Piece
from jaxserve.tool_calls.deltas import ToolCallDelta


@dataclass(slots=True)
class Block:
    """Attributes:
    index: in the answer.
    call: as far as it has come; None for a text.
    """

    index: int
    call: ToolCallDelta | None = None
    texts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Of a text, or of a call's arguments."""
        return "".join(self.texts)


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """Attributes:
    is_new: it is the block's first; the one before it has ended.
    text: new characters of the text, or of the call's arguments.
    """

    block: Block
    is_new: bool
    text: str


class AnswerBlocks:
    """Collects pieces. `blocks` are those so far."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def add(self, piece: Piece, *, wants_text: bool = False) -> list[BlockDelta]:
        """What is new, in order: more of the call under way, text, calls that begin.

        Args:
          wants_text: the piece says something of its text even if that is empty.
        """
        deltas = []
        for call in piece.tool_calls:
            if call.name is None:
                deltas.append(self._append(call.arguments))
        if piece.text or wants_text:
            if not self.blocks or self.blocks[-1].call is not None:
                self.blocks.append(Block(len(self.blocks)))
            deltas.append(self._append(piece.text))
        for call in piece.tool_calls:
            if call.name is not None:
                self.blocks.append(Block(len(self.blocks), call))
                deltas.append(self._append(call.arguments))
        return deltas

    def end(self) -> list[BlockDelta]:
        """The answer has ended; one without anything is an empty text."""
        if self.blocks:
            return []
        self.blocks.append(Block(0))
        return [self._append("")]

    def _append(self, text: str) -> BlockDelta:
        block = self.blocks[-1]
        is_new = not block.texts
        block.texts.append(text)
        return BlockDelta(block, is_new, text)
