"""`POST /v1/embeddings`, in OpenAI's shapes: one vector for each text, of the model that is served.

A text is a request for the engine like any other, of which no tokens are wanted but what its own come to (see
`jaxserve.pooling`): it waits, shares, is preempted and is refused as they are.
"""

from __future__ import annotations

import base64
import time
import uuid
from typing import ClassVar, Literal

import msgspec
import numpy as np

from jaxserve.errors import InvalidRequestError
from jaxserve.outputs import RequestOutput
from jaxserve.request import GenerationRequest, SamplingParams, ServiceTargets
from jaxserve.server.chat_prompt import encode_text
from jaxserve.server.conversion import PreparedRequest, ServingContext, split_prompts
from jaxserve.server.errors import ApiError, renamed_params, unsupported
from jaxserve.server.protocol import decode
from jaxserve.server.responses import Usage, raise_if_failed
from jaxserve.server.service_level import Caller, service_level

MAX_INPUTS = 2048  # of one HTTP request, as in the OpenAI API


class EmbeddingsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """`POST /v1/embeddings`.

    Attributes:
      model: a name of `/v1/models`.
      input: a text, a list of texts, a list of token ids, or a list of such lists.
      encoding_format: "float" (a list of numbers, the default) or "base64" (of little-endian float32).
      dimensions: the width of the model's hidden states, the only one that there is.
      truncate_prompt_tokens: keep no more than that many tokens of each input, the last ones; -1: as many as the
        context holds. Absent, an input that is too long is refused.
      add_special_tokens: whether a BOS token goes before a text, where the model has that habit.
      cache_salt, service_tier, priority, user, slo_ttft_ms: as for `/v1/completions`; the target is for the answer.
    """

    model: str
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    service_tier: str | None = None
    priority: int | None = None
    user: str | None = None
    slo_ttft_ms: float | None = None
    slo_itl_ms: ClassVar[float | None] = None  # there is no second token


class Embedding(msgspec.Struct, kw_only=True):
    """Of the input of that index: float32 numbers, or their bytes in base64."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingsUsage(msgspec.Struct, kw_only=True):
    """Tokens of all inputs."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(msgspec.Struct, kw_only=True):
    """The answer of `POST /v1/embeddings`."""

    object: Literal["list"] = "list"
    data: list[Embedding]
    model: str
    usage: EmbeddingsUsage


def prepare_embeddings(data: bytes, context: ServingContext, caller: Caller) -> PreparedRequest:
    """See `preparation.prepare`."""
    body = decode(data, EmbeddingsBody)
    context.check_model(body.model)
    service = service_level(body, caller, context.service)
    if body.dimensions not in (None, context.embedding_size):
        raise unsupported(
            "dimensions",
            f"embeddings of this model have {context.embedding_size} dimensions, and were not trained to be cut",
        )
    if body.cache_salt == "":
        raise InvalidRequestError("cache_salt must not be empty", param="cache_salt")
    inputs = split_prompts(body.input, param="input")
    if len(inputs) > MAX_INPUTS:
        raise InvalidRequestError(f"input holds {len(inputs)} texts, at most {MAX_INPUTS}", param="input")
    response_id = f"embd-{uuid.uuid4().hex}"
    arrival = time.monotonic()
    params = SamplingParams(max_tokens=0, temperature=0.0, pooling=context.pooling)
    requests = tuple(
        GenerationRequest(
            request_id=f"{response_id}-{index}",
            prompt_token_ids=token_ids,
            params=params,
            priority=service.priority,
            service_class=service.service_class,
            client=service.client,
            targets=ServiceTargets(ttft_seconds=service.targets.ttft_seconds),
            cache_salt=body.cache_salt,
            arrival_time=arrival,
            stream=False,
        )
        for index, token_ids in enumerate(_token_ids(body, inputs, context))
    )
    with renamed_params({"prompt": "input"}):
        for request in requests:
            context.validator.validate(request)
    return PreparedRequest(
        endpoint="/v1/embeddings",
        response_id=response_id,
        created=int(time.time()),
        model=body.model,
        prompts=requests,
        n=1,
        stream=False,
        include_usage=False,
        num_logprobs=None,
        service_tier=service.tier,
        embeds_as=body.encoding_format or "float",
    )


def _token_ids(
    body: EmbeddingsBody, inputs: list[str] | list[list[int]], context: ServingContext
) -> list[tuple[int, ...]]:
    most = _most_tokens(body, context)
    special = body.add_special_tokens is not False

    def encode(text: str) -> tuple[int, ...]:
        if most is not None:  # however long it is
            return tuple(context.tokenizer.encode(text, add_special_tokens=special))
        return encode_text(
            text, context.tokenizer, context.max_model_len, param="input", add_special_tokens=special
        )

    every = [encode(item) if isinstance(item, str) else tuple(item) for item in inputs]
    if not all(every):
        raise InvalidRequestError("input must not be empty", param="input")
    return every if most is None else [token_ids[-most:] for token_ids in every]


def _most_tokens(body: EmbeddingsBody, context: ServingContext) -> int | None:
    """To which inputs are cut; None: they are not."""
    most, longest = body.truncate_prompt_tokens, context.max_model_len
    if most is None or most == -1:
        return None if most is None else longest
    if not 1 <= most <= longest:
        raise InvalidRequestError(
            f"truncate_prompt_tokens must be -1 or between 1 and {longest}, got {most}",
            param="truncate_prompt_tokens",
        )
    return most


class EmbeddingsBuilder:
    """See `answers.Answer`."""

    def __init__(self, prepared: PreparedRequest) -> None:
        self._prepared = prepared
        self._index = {request.request_id: i for i, request in enumerate(prepared.prompts)}
        self._vectors: dict[int, np.ndarray] = {}
        self.usage = Usage()

    def add(self, output: RequestOutput) -> None:
        """Raises: ApiError: the engine could not finish one."""
        raise_if_failed(output)
        if output.embedding is None:
            raise ApiError(500, "an embedding is missing", type="server_error", code="generation_failed")
        index = self._index[output.request_id]
        self._vectors[index] = output.embedding
        self.usage.add(index, index, output)

    @property
    def is_complete(self) -> bool:
        return len(self._vectors) == len(self._index)

    def to_json(self) -> Embeddings:
        """In the order of the inputs."""
        num_tokens = self.usage.prompt_tokens
        return Embeddings(
            data=[
                Embedding(index=index, embedding=self._written(self._vectors[index]))
                for index in range(len(self._vectors))
            ],
            model=self._prepared.model,
            usage=EmbeddingsUsage(prompt_tokens=num_tokens, total_tokens=num_tokens),
        )

    def _written(self, vector_D: np.ndarray) -> list[float] | str:
        if self._prepared.embeds_as == "base64":
            return base64.b64encode(vector_D.astype("<f4").tobytes()).decode()
        numbers: list[float] = vector_D.tolist()
        return numbers
