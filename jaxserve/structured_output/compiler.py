"""Grammars compiled for a model's vocabulary, and kept while they are in use."""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, regex_to_lark

from jaxserve.errors import InvalidRequestError
from jaxserve.grammar import Grammar, GrammarKind
from jaxserve.structured_output.schema_annotations import without_annotations
from jaxserve.tokenizer import Tokenizer

_KEPT = 64  # compiled grammars
_ERROR_CHARS = 300
_TOLD_BETTER = {"NoExtensionBias": "nothing fits it"}  # by llguidance's words
_CONTROL = re.compile("[\x7f-\x9f]")
# A mask takes 0.02 to 0.5 ms as a rule. What would take half a second is too complex.
_LIMITS = LLParserLimits(initial_lexer_fuel=500_000, step_lexer_fuel=50_000, verbose_errors=False)
# Between the parts of JSON: nothing, a space, or a new line with its indentation. A model that may have more goes on
# with newlines until its tokens are used up.
_WHITESPACE = r"(\x20|\x0D?\x0A[\x20\x09]{0,64})?"


class GrammarCompiler:
    """One engine's. Safe from any thread; compiling releases the interpreter lock.

    Args:
      vocab_size: V of the model's logits.
      eos_token_ids: what may come where a grammar may end.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()

    def compile(self, grammar: Grammar) -> LLMatcher:
        """A matcher at the beginning, of the caller's own.

        Raises:
          InvalidRequestError: the grammar is none, is too complex, or can't be had with this model.
        """
        with self._lock:
            known = self._compiled.get(grammar)
            if known is not None:
                self._compiled.move_to_end(grammar)
                return known.deep_copy()
            vocabulary = self._vocabulary = self._vocabulary or self._make_vocabulary()
        matcher = LLMatcher(vocabulary, _source(grammar), log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise _invalid(grammar, matcher.get_error())
        # Some show only with their first mask, which may take long, or token that they are too complex.
        first = np.frombuffer(matcher.compute_bitmask(), np.uint32)
        trial = matcher.deep_copy()
        trial.consume_token(int(np.unpackbits(first.view(np.uint8), bitorder="little").argmax()))
        if reason := self.fault(matcher, first) or self.fault(trial):
            raise _invalid(grammar, reason)
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        return matcher.deep_copy()

    def fault(self, matcher: LLMatcher, mask_W: np.ndarray | None = None) -> str | None:
        """What is wrong with a matcher (that has just made a mask); None if nothing is.

        One that gives up says that the output may end here, whatever its grammar says.
        """
        if matcher.is_error():
            return str(matcher.get_error())
        end = self._eos_token_ids[0]
        if mask_W is not None and mask_W[end // 32] >> np.uint32(end % 32) & 1 and not matcher.is_accepting():
            return "it is too complex"
        return None

    def _make_vocabulary(self) -> LLTokenizer:
        if not self._eos_token_ids:
            raise InvalidRequestError(
                "this model has no end-of-sequence token, so no output of it can keep to a grammar",
                param="grammar",
            )
        return LLTokenizer(
            TokenizerWrapper(_Vocabulary(self._tokenizer, self._vocab_size, self._eos_token_ids[0])),
            eos_token=self._eos_token_ids,
        )


class _Vocabulary:
    """A tokenizer as `TokenizerWrapper` wants it: token bytes are those that outputs are made of."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_id: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = eos_token_id
        self.bos_token_id = tokenizer.bos_token_id
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(i for i in tokenizer.special_token_ids if i < vocab_size)

    def __call__(self, text: str | bytes) -> list[int]:
        if isinstance(text, bytes):
            text = text.decode("utf-8", "replace")
        return self._tokenizer.encode(text, add_special_tokens=False, parse_special=False)


def _source(grammar: Grammar) -> str:
    """In llguidance's own form."""
    try:
        if grammar.kind is GrammarKind.JSON_SCHEMA:
            schema = without_annotations(grammar.text)
            return LLMatcher.grammar_from_json_schema(schema, defaults={"whitespace_pattern": _WHITESPACE})
        if grammar.kind is GrammarKind.REGEX:
            if (len(grammar.text) - len(grammar.text.rstrip("\\"))) % 2:  # the conversion would drop it
                raise ValueError("regex parse error: it ends with a backslash that escapes nothing")
            # \d is 0-9, as people mean it.
            return LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(grammar.text, 'd')}/")
        if grammar.kind is GrammarKind.CHOICE:
            return LLMatcher.grammar_from_lark(f"start: {' | '.join(map(_quoted, json.loads(grammar.text)))}")
        return LLMatcher.grammar_from_lark(grammar.text)
    except ValueError as error:
        raise _invalid(grammar, str(error)) from None
    except RecursionError:
        raise _invalid(grammar, "it is nested too deeply") from None


def _quoted(text: str) -> str:
    """As a string of a Lark grammar, which may hold no control characters."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _invalid(grammar: Grammar, reason: str) -> InvalidRequestError:
    what = "grammar" if grammar.kind is GrammarKind.LARK else grammar.kind.value.replace("_", " ")
    told = _TOLD_BETTER.get(reason.replace("<non-verbose/>", "").strip(), reason)
    line = " ".join(told.replace("<non-verbose/>", "").split())
    short = line if len(line) <= _ERROR_CHARS else line[:_ERROR_CHARS] + "..."
    return InvalidRequestError(f"the {what} can't be used: {short}", param="grammar", code="invalid_grammar")
