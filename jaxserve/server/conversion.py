"""From a decoded body to what the engine runs: prompts to token ids, fields to `SamplingParams`.

The one way in for the HTTP server and for batch files. Everything here is pure and safe to call from any thread;
tokenising a long prompt takes a while, so the server calls it off its event loop.
"""

from __future__ import annotations

import dataclasses
import re
import time
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from jaxserve.config import GenerationDefaults
from jaxserve.errors import InvalidRequestError
from jaxserve.request import MAX_LOGPROBS, MAX_N, GenerationRequest, Pooling, SamplingParams
from jaxserve.server.anthropic.body import prepare_message
from jaxserve.server.chat_prompt import encode_conversation, encode_text
from jaxserve.server.errors import model_not_found, renamed_params, unsupported
from jaxserve.server.openai_responses.body import prepare_response
from jaxserve.server.protocol import (
    ChatCompletionBody,
    CommonFields,
    CompletionBody,
    decode_chat,
    decode_completion,
)
from jaxserve.server.response_format import read_grammar
from jaxserve.server.service_level import Caller, ServiceLevel, ServiceRules, service_level
from jaxserve.server.tool_use import ToolUse, check_tool_choice, check_tools
from jaxserve.tool_calls.tool_format import ToolFormat

if TYPE_CHECKING:
    from jaxserve.tokenizer import Tokenizer

MAX_CHOICES = 1024  # prompts x n of one HTTP request or batch line
MAX_LOGPROB_ENTRIES = 2_000_000  # of one HTTP request or batch line, about 100 bytes each
DEFAULT_COMPLETION_TOKENS = 16
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}", re.ASCII)

Endpoint = Literal[
    "/v1/completions", "/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/embeddings"
]
BATCH_ENDPOINTS: tuple[Endpoint, ...] = ("/v1/completions", "/v1/chat/completions", "/v1/embeddings")


class Validator(Protocol):
    """The part of `EngineCore` that says whether it can run a request at all."""

    def validate(self, request: GenerationRequest) -> None: ...


@dataclass(frozen=True)
class ServingContext:
    """What the conversion needs to know of the engine behind it.

    Attributes:
      model_names: the names that a request may use; the first is the one that answers report.
      max_model_len: longest prompt + output, in tokens.
      service: which class and targets requests have that name none.
      tool_format: how the model writes tool calls; None: not known, so no tools can be offered.
      pooling: how embeddings are made.
      embedding_size: how many numbers one has.
    """

    tokenizer: Tokenizer
    generation: GenerationDefaults
    model_names: tuple[str, ...]
    max_model_len: int
    validator: Validator
    service: ServiceRules = field(default_factory=ServiceRules)
    tool_format: ToolFormat | None = None
    pooling: Pooling = "mean"
    embedding_size: int | None = None

    def check_model(self, name: str) -> None:
        """Raises: ApiError: no such model is served."""
        if name not in self.model_names:
            raise model_not_found(name, self.model_names)


@dataclass(frozen=True, slots=True)
class PreparedRequest:
    """One HTTP request (or batch line), ready for the engine.

    Attributes:
      response_id, created: of the answer; `created` is a Unix time in seconds.
      prompts: one request for the engine a prompt; each brings `n` choices.
      echo_texts: the text that each prompt's choices begin with; None without `echo`.
      echo_logprobs: the prompt's logprobs belong to the choice's own (`echo` with `logprobs`).
      wants_prompt_logprobs: report them in a field of their own.
      num_logprobs: alternatives a token; None without logprobs.
      service_tier: the one that it is served in, where one was asked for.
      repeated: fields of the request that the answer repeats, besides those above.
      tool_use: what of the answer is a tool call; None: nothing.
      embeds_as: how embeddings are written, where they are what is wanted.
    """

    endpoint: Endpoint
    response_id: str
    created: int
    model: str
    prompts: tuple[GenerationRequest, ...]
    n: int
    stream: bool
    include_usage: bool
    num_logprobs: int | None
    echo_texts: tuple[str, ...] | None = None
    echo_logprobs: bool = False
    wants_prompt_logprobs: bool = False
    return_token_ids: bool = False
    service_tier: str | None = None
    repeated: dict[str, Any] = field(default_factory=dict)
    tool_use: ToolUse | None = None
    embeds_as: Literal["float", "base64"] | None = None

    @property
    def is_chat(self) -> bool:
        return self.endpoint != "/v1/completions"

    @property
    def num_choices(self) -> int:
        return len(self.prompts) * self.n


def prepare_generation(
    endpoint: Endpoint, data: bytes, context: ServingContext, caller: Caller = Caller()
) -> PreparedRequest:
    """What asks for text; see `preparation.prepare`."""
    if endpoint == "/v1/completions":
        return _prepare_completion(decode_completion(data), context, caller)
    if endpoint == "/v1/chat/completions":
        return _prepare_chat(decode_chat(data), context, caller)
    prepare_other = prepare_message if endpoint == "/v1/messages" else prepare_response
    return prepare_other(data, lambda chat: _prepare_chat(chat, context, caller))


def _prepare_completion(body: CompletionBody, context: ServingContext, caller: Caller) -> PreparedRequest:
    model = _check_model(body, context)
    service = service_level(body, caller, context.service)
    n = _check_n(body)
    logprobs = _check_num_logprobs("logprobs", body.logprobs)
    echo_logprobs = bool(body.echo) and logprobs is not None
    params = _sampling_params(
        body,
        context,
        max_tokens=DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens,
        logprobs=logprobs,
        prompt_logprobs=logprobs if echo_logprobs and body.prompt_logprobs is None else body.prompt_logprobs,
    )
    grammar, form = read_grammar(body.response_format, body.structured_outputs)
    params = dataclasses.replace(params, grammar=grammar)
    prompts = split_prompts(body.prompt)
    if len(prompts) * n > MAX_CHOICES:
        raise InvalidRequestError(
            f"{len(prompts)} prompts with n={n} make {len(prompts) * n} choices, at most {MAX_CHOICES}",
            param="prompt",
        )
    token_ids = [
        encode_text(
            prompt,
            context.tokenizer,
            context.max_model_len,
            add_special_tokens=_or(body.add_special_tokens, True),
        )
        if isinstance(prompt, str)
        else tuple(prompt)
        for prompt in prompts
    ]
    if not all(token_ids):
        raise InvalidRequestError("prompt must not be empty", param="prompt")
    if (
        body.max_tokens is None
    ):  # the default gives way to a long prompt; a number that was asked for does not
        room = context.max_model_len - max(map(len, token_ids))
        params = dataclasses.replace(
            params, max_tokens=max(1, params.min_tokens, min(DEFAULT_COMPLETION_TOKENS, room))
        )
    response_id = f"cmpl-{uuid.uuid4().hex}"
    requests = _generation_requests(body, service, response_id, token_ids, params)
    with renamed_params({"grammar": form}):
        for request in requests:
            context.validator.validate(request)
    _check_logprob_entries(requests, context, copies_of_prompt=n if echo_logprobs else 1)
    echo_texts = None
    if body.echo:
        echo_texts = tuple(
            prompt
            if isinstance(prompt, str)
            else context.tokenizer.decode(prompt, skip_special_tokens=params.skip_special_tokens)
            for prompt in prompts
        )
    return PreparedRequest(
        endpoint="/v1/completions",
        response_id=response_id,
        created=int(time.time()),
        model=model,
        prompts=requests,
        n=n,
        stream=bool(body.stream),
        include_usage=_includes_usage(body),
        num_logprobs=logprobs,
        echo_texts=echo_texts,
        echo_logprobs=echo_logprobs,
        wants_prompt_logprobs=body.prompt_logprobs is not None,
        return_token_ids=bool(body.return_token_ids),
        service_tier=service.tier,
    )


def _prepare_chat(body: ChatCompletionBody, context: ServingContext, caller: Caller) -> PreparedRequest:
    model = _check_model(body, context)
    service = service_level(body, caller, context.service)
    n = _check_n(body)
    logprobs = _check_num_logprobs("top_logprobs", body.top_logprobs)
    if logprobs is not None and not body.logprobs:
        raise InvalidRequestError(
            "'top_logprobs' is allowed only with 'logprobs': true", param="top_logprobs"
        )
    if body.logprobs and logprobs is None:
        logprobs = 0
    params = _sampling_params(
        body,
        context,
        max_tokens=_chat_max_tokens(body),
        logprobs=logprobs,
        prompt_logprobs=body.prompt_logprobs,
    )
    grammar, form = read_grammar(body.response_format, body.structured_outputs)
    tool_use = _tool_use(body, context)
    shown: frozenset[int] = frozenset()
    if tool_use is not None:
        shown = context.tokenizer.special_ids_of(tool_use.tool_format.marks)
        if grammar is not None:
            raise unsupported(form, f"'{form}' is not supported together with 'tools'")
        grammar, form = tool_use.forced_calls(body.tools or (), body.tool_choice, context.tokenizer), "tools"
    params = dataclasses.replace(params, grammar=grammar, shown_special_token_ids=shown)
    token_ids = encode_conversation(
        body,
        context.tokenizer,
        context.max_model_len,
        tools=None if tool_use is None else body.tools,
        tool_format=context.tool_format,
    )
    response_id = f"chatcmpl-{uuid.uuid4().hex}"
    requests = _generation_requests(body, service, response_id, [token_ids], params)
    _validate_chat(requests[0], body, context, form)
    _check_logprob_entries(requests, context, copies_of_prompt=1)
    return PreparedRequest(
        endpoint="/v1/chat/completions",
        response_id=response_id,
        created=int(time.time()),
        model=model,
        prompts=requests,
        n=n,
        stream=bool(body.stream),
        include_usage=_includes_usage(body),
        num_logprobs=logprobs,
        wants_prompt_logprobs=body.prompt_logprobs is not None,
        return_token_ids=bool(body.return_token_ids),
        service_tier=service.tier,
        tool_use=tool_use,
    )


def _tool_use(body: ChatCompletionBody, context: ServingContext) -> ToolUse | None:
    """None where nothing may be called."""
    check_tools(body.tools, context.tool_format)
    check_tool_choice(body.tool_choice, body.tools)
    if not body.tools or context.tool_format is None or body.tool_choice == "none":
        return None
    names = tuple(tool.function.name for tool in body.tools)
    return ToolUse(context.tool_format, names, max_calls=1 if body.parallel_tool_calls is False else None)


def _check_model(body: CommonFields, context: ServingContext) -> str:
    if body.model is None:
        raise InvalidRequestError("missing field 'model'", param="model", code="missing_field")
    context.check_model(body.model)
    return body.model


def _check_n(body: CommonFields) -> int:
    n = _or(body.n, 1)
    if not 1 <= n <= MAX_N:
        raise InvalidRequestError(f"n must be between 1 and {MAX_N}, got {n}", param="n")
    return n


def _check_num_logprobs(name: str, value: int | None) -> int | None:
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise InvalidRequestError(f"{name} must be between 0 and {MAX_LOGPROBS}, got {value}", param=name)
    return value


def _validate_chat(
    request: GenerationRequest, body: ChatCompletionBody, context: ServingContext, form: str
) -> None:
    """The engine's own checks, with the parameters called what the client called them.

    Args:
      form: the name of the field that asks for a grammar.
    """
    names = {"prompt": "messages", "grammar": form}
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    with renamed_params(names):
        context.validator.validate(request)


def _check_logprob_entries(
    requests: tuple[GenerationRequest, ...], context: ServingContext, *, copies_of_prompt: int
) -> None:
    """Refuse an answer that would be huge: tokens x alternatives x choices, at the most that may be generated."""
    entries = 0
    for request in requests:
        params, length = request.params, len(request.prompt_token_ids)
        room = context.max_model_len - length
        longest = room if params.max_tokens is None else min(params.max_tokens, room)
        if params.logprobs is not None:
            entries += params.n * longest * (params.logprobs + 1)
        if params.prompt_logprobs is not None:
            entries += copies_of_prompt * length * (params.prompt_logprobs + 1)
    if entries > MAX_LOGPROB_ENTRIES:
        raise InvalidRequestError(
            f"the answer could hold {entries} logprobs, at most {MAX_LOGPROB_ENTRIES}; ask for fewer logprobs, "
            "choices, prompts or tokens",
            param="logprobs",
        )


def _chat_max_tokens(body: ChatCompletionBody) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise InvalidRequestError(
            f"'max_tokens' ({old}) and 'max_completion_tokens' ({new}) contradict each other; give one",
            param="max_completion_tokens",
        )
    if new is not None and new < 0:
        raise InvalidRequestError(
            f"max_completion_tokens must be at least 0, got {new}", param="max_completion_tokens"
        )
    return old if new is None else new


def _includes_usage(body: CommonFields) -> bool:
    return body.stream_options is not None and bool(body.stream_options.include_usage)


def _sampling_params(
    body: CommonFields,
    context: ServingContext,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    defaults = context.generation
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    return SamplingParams(
        n=_or(body.n, 1),
        temperature=_or(body.temperature, _or(defaults.temperature, 1.0)),
        top_p=_or(body.top_p, _or(defaults.top_p, 1.0)),
        top_k=_or(body.top_k, _or(defaults.top_k, 0)),
        min_p=_or(body.min_p, 0.0),
        presence_penalty=_or(body.presence_penalty, 0.0),
        frequency_penalty=_or(body.frequency_penalty, 0.0),
        repetition_penalty=_or(body.repetition_penalty, _or(defaults.repetition_penalty, 1.0)),
        logit_bias=_logit_bias(body),
        seed=body.seed,
        max_tokens=max_tokens,
        min_tokens=_or(body.min_tokens, 0),
        stop=stop,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        skip_special_tokens=_or(body.skip_special_tokens, True),
        speculative_tokens=body.speculative_tokens,
    )


def _logit_bias(body: CommonFields) -> dict[int, float] | None:
    if not body.logit_bias:
        return None
    bias: dict[int, float] = {}
    for key, value in body.logit_bias.items():
        if _TOKEN_ID.fullmatch(key) is None:
            raise InvalidRequestError(f"logit_bias: {key[:40]!r} is not a token id", param="logit_bias")
        bias[int(key)] = value
    return bias


def split_prompts(
    prompt: str | list[str | int | list[int]] | None, *, param: str = "prompt"
) -> list[str] | list[list[int]]:
    """A text, a list of texts, token ids, or a list of such lists, as one thing or the other.

    Args:
      param: what the client calls it.

    Raises:
      InvalidRequestError: it is missing, empty or mixed.
    """
    if prompt is None:
        raise InvalidRequestError(f"missing field '{param}'", param=param, code="missing_field")
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise InvalidRequestError(f"{param} must not be an empty list", param=param)
    if all(isinstance(item, str) for item in prompt):
        return [item for item in prompt if isinstance(item, str)]
    if all(isinstance(item, int) for item in prompt):
        return [[item for item in prompt if isinstance(item, int)]]
    if all(isinstance(item, list) for item in prompt):
        return [item for item in prompt if isinstance(item, list)]
    raise InvalidRequestError(f"{param} must not mix texts, token ids and lists of token ids", param=param)


def _generation_requests(
    body: CommonFields,
    service: ServiceLevel,
    response_id: str,
    prompts: list[tuple[int, ...]],
    params: SamplingParams,
) -> tuple[GenerationRequest, ...]:
    if body.cache_salt == "":
        raise InvalidRequestError("cache_salt must not be empty", param="cache_salt")
    arrival = time.monotonic()
    return tuple(
        GenerationRequest(
            request_id=f"{response_id}-{index}",
            prompt_token_ids=token_ids,
            params=params,
            priority=service.priority,
            service_class=service.service_class,
            client=service.client,
            targets=service.targets,
            cache_salt=body.cache_salt,
            arrival_time=arrival,
            stream=bool(body.stream),
        )
        for index, token_ids in enumerate(prompts)
    )


def _or[T](value: T | None, default: T) -> T:
    return default if value is None else value
