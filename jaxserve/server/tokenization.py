"""`POST /tokenize` and `POST /detokenize`, in vLLM's shapes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.chat_prompt import encode_conversation, encode_text
from jaxserve.server.protocol import ChatMessage, Tool, decode, refuse_unhonoured
from jaxserve.server.tool_use import check_tools

if TYPE_CHECKING:
    from jaxserve.server.conversion import ServingContext


class TokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /tokenize`: either `prompt` or `messages`.

    Attributes:
      model: a name of `/v1/models`; absent, the server's first.
      prompt: a text, tokenised as by `/v1/completions`.
      messages, add_generation_prompt, continue_final_message, chat_template_kwargs, tools: as for
        `/v1/chat/completions`.
      add_special_tokens: for `prompt`: whether a BOS token goes before it, where the model has that habit (true). A
        conversation has those of its template.
      return_token_strs: add the text of each token.
    """

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Tool] | None = None
    # Known, not honoured.
    chat_template: Any = None


class DetokenizeBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /detokenize`: `tokens`, ids, whose text is asked for, that of special tokens included."""

    tokens: list[int]
    model: str | None = None


class Tokenized(msgspec.Struct, kw_only=True):
    """The answer of `POST /tokenize`."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Detokenized(msgspec.Struct, kw_only=True):
    """The answer of `POST /detokenize`."""

    prompt: str


def tokenize(data: bytes, context: ServingContext) -> Tokenized:
    """Raises: InvalidRequestError, ApiError."""
    body = decode(data, TokenizeBody)
    if body.model is not None:
        context.check_model(body.model)
    refuse_unhonoured(body, ("chat_template",), {"chat_template": ([],)})
    check_tools(body.tools, context.tool_format)
    tokenizer, longest = context.tokenizer, context.max_model_len
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("give either 'prompt' or 'messages'", param="prompt")
    if body.prompt is None:
        if body.add_special_tokens:
            raise InvalidRequestError(
                "'add_special_tokens' is for 'prompt': a chat template brings its own",
                param="add_special_tokens",
            )
        tokens = encode_conversation(
            body, tokenizer, longest, tools=body.tools, tool_format=context.tool_format
        )
    else:
        for name in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs", "tools"):
            if getattr(body, name) is not None:
                raise InvalidRequestError(f"'{name}' is for 'messages'", param=name)
        special = body.add_special_tokens is not False
        tokens = encode_text(body.prompt, tokenizer, longest, add_special_tokens=special)
    texts = None
    if body.return_token_strs:
        texts = [tokenizer.decode([token], skip_special_tokens=False) for token in tokens]
    return Tokenized(
        count=len(tokens),
        max_model_len=longest,
        tokens=list(tokens),
        token_strs=texts,
    )


def detokenize(data: bytes, context: ServingContext) -> Detokenized:
    """Raises: InvalidRequestError, ApiError."""
    body = decode(data, DetokenizeBody)
    if body.model is not None:
        context.check_model(body.model)
    size = context.tokenizer.vocab_size
    for token in body.tokens:
        if not 0 <= token < size:
            raise InvalidRequestError(
                f"there is no token {token}; ids go from 0 to {size - 1}", param="tokens"
            )
    return Detokenized(prompt=context.tokenizer.decode(body.tokens, skip_special_tokens=False))
