"""The request bodies of the HTTP API: which fields exist, their types, and how a body is decoded.

Rules, the same for every field of both endpoints:

* A field that is not listed here is refused (400, its name in `param`).
* A field of the OpenAI API that is listed here but not honoured is refused unless its value asks for nothing
  (`null`, or the values in `_NEUTRAL`).
* `null` means absent.
* Types are strict: no number is read out of a string, no boolean is a number.
* `metadata`, `safety_identifier` and `prompt_cache_key` are labels for a provider's own books. They are accepted, have
  no effect and are not stored.

Fields follow the OpenAI API (https://platform.openai.com/docs/api-reference); those past it carry the names that
vLLM gave them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import msgspec

from jaxserve.errors import InvalidRequestError
from jaxserve.server.errors import unsupported
from jaxserve.server.response_format import ResponseFormat, StructuredOutputs


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`include_usage`: send one more chunk, with the token counts, before the end of the stream."""

    include_usage: bool | None = None
    include_obfuscation: Any = None


class CommonFields(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What both endpoints take. Sampling fields mean what `jaxserve.request.SamplingParams` says.

    Attributes:
      model: a name of `/v1/models`.
      n: choices for each prompt.
      max_tokens: see the endpoint.
      stream, stream_options: answer by server-sent events.
      prompt_logprobs: report logprobs of the prompt's tokens as well.
      cache_salt: only requests with an equal salt share cached prompt beginnings.
      service_tier, priority, user, slo_ttft_ms, slo_itl_ms: how it is served, see `jaxserve.server.service_level`.
      response_format, structured_outputs: what the answer must look like, see `jaxserve.server.response_format`.
      return_token_ids: add the token ids of prompt and choices to the answer.
      temperature, top_p, top_k, repetition_penalty: absent, the model's generation defaults decide, then 1, 1, 0, 1.
    """

    model: str | None = None
    n: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    min_tokens: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    service_tier: str | None = None
    priority: int | None = None
    user: str | None = None
    slo_ttft_ms: float | None = None
    slo_itl_ms: float | None = None
    return_token_ids: bool | None = None
    speculative_tokens: int | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # Labels without effect.
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    # Known, not honoured.
    best_of: int | None = None
    store: bool | None = None


class CompletionBody(CommonFields, kw_only=True):
    """`POST /v1/completions`.

    Attributes:
      prompt: a text, a list of texts, a list of token ids, or a list of such lists. Choice `c` of prompt `p` has the
        index `p * n + c`.
      max_tokens: 16 where absent, as in the OpenAI API; 0 generates nothing (finish_reason "length").
      echo: the choice's text begins with the prompt.
      logprobs: how many alternatives (0 to 20) to report for each token.
      add_special_tokens: whether a BOS token goes before a text prompt, where the model has that habit.
    """

    prompt: str | list[str | int | list[int]] | None = None
    echo: bool | None = None
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    suffix: Any = None


class FunctionDefinition(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A function that the model may call.

    Attributes:
      name: letters, digits, `_` and `-`.
      parameters: a JSON schema of an object; absent, the function takes nothing.
      strict: required and named calls keep to the schema in any case; others are not made to, whatever it says.
    """

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A tool. There are only functions."""

    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The function that is to be called."""

    name: str


class NamedToolChoice(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """That function, and no other, is to be called."""

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`arguments` is the text of a JSON object; an empty one counts as `{}`."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A call in an earlier answer. `index`, which calls have in streams, has no effect."""

    id: str
    function: CalledFunction
    type: Literal["function"] = "function"
    index: int | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """One turn.

    Attributes:
      content: a text or a list of `{"type": "text", "text": ...}` parts, joined by newlines. An assistant's message
        with calls needs none.
      tool_calls: what an assistant called.
      tool_call_id: which call the content of a `tool` message is the result of.
    """

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    # What a client may send back of an earlier answer; only empty values are accepted.
    refusal: Any = None
    annotations: Any = None
    audio: Any = None
    function_call: Any = None


class ChatCompletionBody(CommonFields, kw_only=True):
    """`POST /v1/chat/completions`.

    Attributes:
      max_completion_tokens: the current name of `max_tokens`; where both are given they must be equal. Absent: as
        many as fit; 0 generates nothing (finish_reason "length").
      logprobs, top_logprobs: report each token's logprob, and that many (0 to 20) alternatives.
      add_generation_prompt: end the prompt with the beginning of the assistant's turn (default: true, unless the
        final message is continued).
      continue_final_message: the last message, the assistant's, is left open and goes on.
      chat_template_kwargs: further variables for the model's chat template.
      tools: functions that the model may call.
      tool_choice: `auto` (where there are tools): it may; `none`: it may not, and is not told of them; `required`: it
        has to call one at least; a named one: it has to call that one.
      parallel_tool_calls: false: one call at most.
    """

    messages: list[ChatMessage] | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = None
    # Known, not honoured.
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    prompt_cache_retention: Any = None


# Values of fields that we do not honour which ask for nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}
_UNHONOURED = (
    "store",
    "suffix",
    "functions",
    "function_call",
    "audio",
    "modalities",
    "prediction",
    "reasoning_effort",
    "verbosity",
    "web_search_options",
    "prompt_cache_retention",
)

_PATH = re.compile(r" - at `(?:key in )?\$\.?(?P<path>.*)`$")
_NAMED_FIELD = re.compile(r"(?:unknown|required) field `(?P<name>.*?)`")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


def decode_completion(data: bytes) -> CompletionBody:
    """Decode and check a body by the rules above. Raises: InvalidRequestError."""
    body = decode(data, CompletionBody)
    _check_unhonoured(body)
    return body


def decode_chat(data: bytes) -> ChatCompletionBody:
    """Decode and check a body by the rules above. Raises: InvalidRequestError."""
    body = decode(data, ChatCompletionBody)
    _check_unhonoured(body)
    return body


def decode[Body: msgspec.Struct](data: bytes, kind: type[Body], *, what: str = "the body") -> Body:
    """JSON bytes to `kind`; anything malformed (NaN, lone surrogates, bad UTF-8, deep nesting) is refused.

    Args:
      what: it is, for messages.

    Raises:
      InvalidRequestError: one line; `param` is the path of the offending field where one is at fault.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise _field_error(str(error), what) from None
    except msgspec.DecodeError as error:
        hint = " (an unpaired surrogate escape?)" if _SURROGATE_ESCAPE.search(data) else ""
        raise InvalidRequestError(f"{what} is not valid JSON: {error}{hint}", code="invalid_json") from None
    except RecursionError:
        raise InvalidRequestError(f"{what} is nested too deeply", code="invalid_json") from None


def refuse_unhonoured(
    body: msgspec.Struct, names: Iterable[str], neutral: Mapping[str, tuple[Any, ...]]
) -> None:
    """Refuse known fields that are not honoured, except where they ask for nothing.

    Args:
      names: of such fields; `body` need not have all of them.
      neutral: the values that ask for nothing, besides null.

    Raises:
      InvalidRequestError: `param` is the field.
    """
    for name in names:
        value = getattr(body, name, None)
        if value is not None and value not in neutral.get(name, ()):
            raise unsupported(name, f"'{name}' is not supported by this server")


def _field_error(message: str, what: str) -> InvalidRequestError:
    path_match = _PATH.search(message)
    path = path_match["path"] if path_match else ""
    text = message[: path_match.start()] if path_match else message
    named = _NAMED_FIELD.search(text)
    if named is not None:
        path = f"{path}.{named['name']}" if path else named["name"]
        kind = "unknown field" if "unknown" in text else "missing field"
        return InvalidRequestError(f"{kind} '{path}'", param=path, code=kind.replace(" ", "_"))
    param = re.sub(r"(\[[^\]]*\])+$", "", path)  # the list's name says more than the place in it
    where = f"{path}: " if path else f"{what}: "
    return InvalidRequestError(where + text[0].lower() + text[1:], param=param or None, code="invalid_type")


def _check_unhonoured(body: CommonFields) -> None:
    refuse_unhonoured(body, _UNHONOURED, _NEUTRAL)
    if body.best_of is not None and body.best_of != (1 if body.n is None else body.n):
        raise unsupported("best_of", "'best_of' other than 'n' is not supported by this server")
    options = body.stream_options
    if options is not None and options.include_obfuscation not in (None, False):
        raise unsupported(
            "stream_options.include_obfuscation", "'include_obfuscation' is not supported by this server"
        )
    if options is not None and not body.stream:
        raise InvalidRequestError(
            "'stream_options' is allowed only with 'stream': true", param="stream_options"
        )
