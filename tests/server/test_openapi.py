"""`/openapi.json`: true of the routes, and of what schemathesis finds out about them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)

from jaxserve.server.openapi import OPERATIONS, Operation, openapi_document
from jaxserve.tokenizer import Tokenizer
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer

# Not "a body that fits its schema is taken": a schema does not say how fields go together, nor how long a text may be.
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]


@pytest.fixture(scope="module")
def server(tokenizer: Tokenizer) -> Iterator[RunningServer]:
    with RunningServer(CopyEngine(tokenizer, max_request_tokens=64)) as running:
        yield running


SCHEMA = schemathesis.openapi.from_dict(openapi_document(OPERATIONS, ("copy",), version="0", has_keys=False))


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda one: f"{one.method} {one.path}")
def test_what_it_says_holds(server: RunningServer, operation: Operation) -> None:
    cases = SCHEMA[operation.path][operation.method].as_strategy

    @settings(
        max_examples=15,
        deadline=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        fitting=cases(), other=cases(generation_mode=GenerationMode.NEGATIVE) if operation.body else st.none()
    )
    def ask(fitting: schemathesis.Case, other: schemathesis.Case | None) -> None:
        for case in (fitting, other):
            if case is not None:
                case.call_and_validate(base_url=server.base_url, checks=CHECKS, timeout=60)

    ask()


def test_it_names_every_route(server: RunningServer) -> None:
    document = http.request(server.base_url, "GET", "/openapi.json").json
    assert document["openapi"].startswith("3.1")
    described = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    served = {
        (route.method, route.resource.canonical)
        for route in server.app.router.routes()
        if route.resource is not None and route.method != "HEAD"
    }
    assert described == served == {(one.method.upper(), one.path) for one in OPERATIONS}
    schemas = document["components"]["schemas"]
    fields = schemas["ChatCompletionBody"]
    assert fields["properties"]["model"] == {"enum": ["copy", None]}
    assert schemas["MessagesBody"]["properties"]["model"] == {"enum": ["copy"]}
    assert fields["additionalProperties"] is False
