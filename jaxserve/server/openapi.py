"""The OpenAPI 3.1 document of `GET /openapi.json`, made of the types that bodies are decoded into."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from jaxserve.server.anthropic.body import CountTokensBody, MessagesBody, TokenCount
from jaxserve.server.embeddings import Embeddings, EmbeddingsBody
from jaxserve.server.errors import ErrorBody
from jaxserve.server.openai_responses.body import ResponsesBody
from jaxserve.server.protocol import ChatCompletionBody, CompletionBody
from jaxserve.server.tokenization import DetokenizeBody, Detokenized, TokenizeBody, Tokenized

_PARAMETER = re.compile(r"\{(\w+)\}")
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
_STREAM = {"text/event-stream": {"schema": {"type": "string"}}}
_ERRORS = {
    400: "The request can't be honoured as asked.",
    401: "A valid API key is required.",
    404: "There is no such model, or thing.",
    409: "It is too late for that.",
    413: "The body is too large.",
    429: "There is more work than can be done in time.",
    500: "A failed generation, or a bug.",
    503: "The server takes no requests for now.",
    507: "The disk of the server is full.",
}


@dataclass(frozen=True)
class Operation:
    """What can be done at a path.

    Attributes:
      body: the type that validates it; None: there is none.
      answer: the type of it; None: an object that is described elsewhere.
      content_type: of an answer that is not JSON.
      uploads: the body is a form with a file and its purpose.
      streams: the answer may be a stream of events.
      query: schemas of what may follow `?`, by name.
      errors: statuses besides 401 and 500.
      error: the type of their body; None: an object that is described elsewhere.
      is_open: needs no key.
    """

    method: str
    path: str
    summary: str
    body: type[msgspec.Struct] | None = None
    answer: type[msgspec.Struct] | None = None
    content_type: str = "application/json"
    streams: bool = False
    uploads: bool = False
    query: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    errors: tuple[int, ...] = ()
    error: type[msgspec.Struct] | None = ErrorBody
    is_open: bool = False


_GENERATION = (400, 404, 413, 429, 503)
OPERATIONS = (
    Operation(
        "post", "/v1/completions", "Go on with a text.", CompletionBody, streams=True, errors=_GENERATION
    ),
    Operation(
        "post",
        "/v1/chat/completions",
        "Answer a conversation.",
        ChatCompletionBody,
        streams=True,
        errors=_GENERATION,
    ),
    Operation(
        "post",
        "/v1/responses",
        "The same, in the shapes of the Responses API.",
        ResponsesBody,
        streams=True,
        errors=_GENERATION,
    ),
    Operation(
        "post",
        "/v1/messages",
        "The same, in the shapes of Anthropic's Messages API; so are its errors.",
        MessagesBody,
        streams=True,
        errors=_GENERATION,
        error=None,
    ),
    Operation(
        "post",
        "/v1/messages/count_tokens",
        "How many tokens such a prompt has.",
        CountTokensBody,
        TokenCount,
        errors=(400, 404, 413),
        error=None,
    ),
    Operation(
        "post",
        "/v1/embeddings",
        "A vector for each text.",
        EmbeddingsBody,
        Embeddings,
        errors=_GENERATION,
    ),
    Operation("post", "/tokenize", "Text to tokens.", TokenizeBody, Tokenized, errors=(400, 404, 413)),
    Operation("post", "/detokenize", "Tokens to text.", DetokenizeBody, Detokenized, errors=(400, 404, 413)),
    Operation("get", "/v1/models", "The models served."),
    Operation("get", "/v1/models/{name}", "One of them.", errors=(404,)),
    Operation("get", "/health", "Can the process do its work?", errors=(503,), error=None, is_open=True),
    Operation("get", "/ready", "Would a request be taken now?", errors=(503,), is_open=True),
    Operation("get", "/metrics", "Prometheus metrics.", content_type="text/plain", is_open=True),
    Operation("get", "/version", "Of the server.", is_open=True),
    Operation("get", "/openapi.json", "This document.", is_open=True),
)


def openapi_document(
    operations: tuple[Operation, ...], model_names: tuple[str, ...], *, version: str, has_keys: bool
) -> dict[str, Any]:
    """JSON-ready.

    Args:
      operations: all that are served.
      model_names: those that requests may use.
      has_keys: an API key is required.
    """
    types: list[type[msgspec.Struct]] = [
        kind for one in operations for kind in (one.error, one.body, one.answer) if kind is not None
    ]
    refs, components = msgspec.json.schema_components(types, ref_template="#/components/schemas/{name}")
    schemas = dict(zip(types, refs, strict=True))
    for one in operations:
        if one.body is not None:
            _name_models(components[one.body.__name__], model_names)
    paths: dict[str, dict[str, Any]] = {}
    for one in operations:
        paths.setdefault(one.path, {})[one.method] = _operation(one, schemas, has_keys=has_keys)
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": version},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "X-Api-Key"},
            },
        },
    }


def _operation(
    one: Operation, schemas: dict[type[msgspec.Struct], dict[str, Any]], *, has_keys: bool
) -> dict[str, Any]:
    answer = _ANY_OBJECT if one.answer is None else schemas[one.answer]
    if one.content_type != "application/json":
        answer = {"type": "string"}
    content: dict[str, Any] = {one.content_type: {"schema": answer}, **(_STREAM if one.streams else {})}
    error = _ANY_OBJECT if one.error is None else schemas[one.error]
    statuses = sorted({*one.errors, 500, *([] if one.is_open or not has_keys else [401])})
    result: dict[str, Any] = {
        "summary": one.summary,
        "operationId": one.method + one.path.replace("/", "_").replace("{", "").replace("}", ""),
        "responses": {
            "200": {"description": "The answer.", "content": content},
            **{
                str(status): {
                    "description": _ERRORS[status],
                    "content": {"application/json": {"schema": error}},
                }
                for status in statuses
            },
        },
        "security": [] if one.is_open or not has_keys else [{"bearer": []}, {"header": []}],
    }
    if one.body is not None:
        result["requestBody"] = {
            "required": True,
            "content": {"application/json": {"schema": schemas[one.body]}},
        }
    if one.uploads:
        fields = {"file": {"type": "string", "format": "binary"}, "purpose": {"enum": ["batch"]}}
        form = {"type": "object", "properties": fields, "required": list(fields)}
        result["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": form}}}
    text = {"type": "string", "minLength": 1}
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in _PARAMETER.findall(one.path)
    ]
    parameters += [{"name": name, "in": "query", "schema": schema} for name, schema in one.query.items()]
    if parameters:
        result["parameters"] = parameters
    return result


def _name_models(schema: dict[str, Any], model_names: tuple[str, ...]) -> None:
    """Say which models there are, where a body names one."""
    model = schema["properties"].get("model")
    if model is not None:  # it may be null where it may be absent
        schema["properties"]["model"] = {"enum": [*model_names, *([] if "type" in model else [None])]}
