"""How a request is served: what of its body, its headers and the server's rules counts, and what is refused by name."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.config import GenerationDefaults
from jaxserve.errors import InvalidRequestError
from jaxserve.request import GenerationRequest, ServiceClass, ServiceTargets
from jaxserve.server.conversion import ServingContext, prepare_generation
from jaxserve.server.responses import ChunkBuilder, ResponseBuilder
from jaxserve.server.service_level import Caller, ServiceRules, client_name, read_caller
from jaxserve.tokenizer import Tokenizer
from tests.server.copy_engine import CopyEngine

ENDPOINTS: dict[Any, dict[str, Any]] = {
    "/v1/completions": {"prompt": ["Hello", "there"]},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hello"}]},
}
RULES = ServiceRules(
    interactive=ServiceTargets(2.0, 0.5), background=ServiceTargets(60.0, None), client_secret=b"secret"
)
INTERACTIVE, BACKGROUND = ServiceClass.INTERACTIVE, ServiceClass.BACKGROUND


class Door:
    def __init__(self, tokenizer: Tokenizer, rules: ServiceRules = RULES) -> None:
        self.tokenizer = tokenizer
        self._context = ServingContext(
            tokenizer, GenerationDefaults(), ("copy",), 2048, CopyEngine(tokenizer), rules
        )

    def prepared(self, endpoint: Any, headers: dict[str, str] | None = None, **fields: Any) -> Any:
        body = {"model": "copy", **ENDPOINTS[endpoint], **fields}
        return prepare_generation(
            endpoint, json.dumps(body).encode(), self._context, read_caller(headers or {})
        )

    def request(self, headers: dict[str, str] | None = None, **fields: Any) -> GenerationRequest:
        """The same of both endpoints and for every prompt of a request, or it is no answer."""
        requests = [
            request
            for endpoint in ENDPOINTS
            for request in self.prepared(endpoint, headers, **fields).prompts
        ]
        levels = {(r.service_class, r.priority, r.client, r.targets) for r in requests}
        assert len(levels) == 1
        assert len(requests) == 3
        return requests[0]


@pytest.fixture
def door(tokenizer: Tokenizer) -> Door:
    return Door(tokenizer)


@pytest.mark.parametrize(
    ("tier", "service_class", "reported"),
    [
        (None, INTERACTIVE, None),
        ("auto", INTERACTIVE, "default"),
        ("default", INTERACTIVE, "default"),
        ("priority", INTERACTIVE, "priority"),
        ("flex", BACKGROUND, "flex"),
    ],
)
def test_a_tier_is_a_class_and_is_reported(
    door: Door, tier: str | None, service_class: ServiceClass, reported: str | None
) -> None:
    assert door.request(service_tier=tier).service_class is service_class
    for endpoint in ENDPOINTS:
        prepared = door.prepared(endpoint, service_tier=tier)
        whole = ResponseBuilder(prepared, door.tokenizer).to_json()
        chunk = ChunkBuilder(prepared, door.tokenizer).usage_chunk()
        assert whole.get("service_tier") == chunk.get("service_tier") == reported


@settings(max_examples=25, deadline=None)
@given(default=st.integers(-(2**31), 2**31 - 1), prior=st.integers(-(2**31), 2**31 - 1))
def test_the_priority_tier_comes_before_any_number_of_the_default_one(
    tokenizer: Tokenizer, default: int, prior: int
) -> None:
    door = Door(tokenizer)
    of_priority = door.request(service_tier="priority", priority=prior).priority
    of_default = door.request(service_tier="default", priority=default).priority
    assert of_priority < of_default == default
    # ... and the number still decides within the tier.
    assert of_priority - door.request(service_tier="priority", priority=0).priority == prior


@pytest.mark.parametrize("value", ["", "Flex", "scale", "interactive"])
def test_an_unknown_tier_is_refused(door: Door, value: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        door.request(service_tier=value)
    assert caught.value.param == "service_tier"


def test_body_then_header_then_class(door: Door) -> None:
    """Each target for itself, for every combination of places that name one."""
    milliseconds = {"body": 100.0, "header": 200.0}
    for tier, own in (("default", (2.0, 0.5)), ("flex", (60.0, None))):
        for ttft, itl in itertools.product(((), ("header",), ("body",), ("body", "header")), repeat=2):
            headers, body = {}, {}
            for place in ttft:
                (body if place == "body" else headers).update(
                    {"slo_ttft_ms" if place == "body" else "X-SLO-TTFT-MS": milliseconds[place]}
                )
            for place in itl:
                (body if place == "body" else headers).update(
                    {"slo_itl_ms" if place == "body" else "X-SLO-ITL-MS": milliseconds[place]}
                )
            texts = {name: str(value) for name, value in headers.items()}
            targets = door.request(texts, service_tier=tier, **body).targets
            expected = tuple(
                milliseconds[places[0]] / 1000 if places else default
                for places, default in zip((ttft, itl), own, strict=True)
            )
            assert (targets.ttft_seconds, targets.itl_seconds) == expected


BAD_NUMBERS = [0, -1, 1e12, -0.001]


@pytest.mark.parametrize("name", ["slo_ttft_ms", "slo_itl_ms"])
@pytest.mark.parametrize("value", [*BAD_NUMBERS, "100", True, [1]])
def test_a_target_that_is_none_is_refused_by_its_field(door: Door, name: str, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        door.request(**{name: value})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["X-SLO-TTFT-MS", "X-SLO-ITL-MS"])
@pytest.mark.parametrize(
    "text", [*map(str, BAD_NUMBERS), "", "fast", "nan", "inf", "1e999", "1,5", "10 20", "\udcff"]
)
def test_a_target_that_is_none_is_refused_by_its_header(door: Door, name: str, text: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        door.request({name: text})
    assert caught.value.param == name


@pytest.mark.parametrize("value", [2**31, -(2**31) - 1, 1.5, "1", True])
def test_a_priority_that_is_none_is_refused(door: Door, value: Any) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        door.request(priority=value)
    assert caught.value.param == "priority"


def test_clients_are_told_apart_by_key_and_user(door: Door) -> None:
    keys = [{}, {"Authorization": "Bearer k1"}, {"Authorization": "Bearer k2"}]
    users = [None, "ann", "bob"]
    clients = [door.request(key, user=user).client for key in keys for user in users]
    assert len(set(clients)) == 9
    assert clients[0] == ""
    assert clients == [door.request(key, user=user).client for key in keys for user in users], "and stay"
    assert door.request({"Authorization": "Basic k1"}).client == "", "no key of ours"
    assert client_name("a", "b", b"") != client_name("a\0b", "", b"") != client_name("", "a\0b", b"")


def test_keys_and_users_go_nowhere(tokenizer: Tokenizer) -> None:
    """Not into what the engine may record or log, and not as something that guesses can be tried on."""
    caller = read_caller({"Authorization": "Bearer hunter2"})
    assert "hunter2" not in repr(caller)
    rules = [ServiceRules(client_secret=secret) for secret in (b"sesame", b"other")]
    assert "sesame" not in repr(rules[0])
    clients = {
        Door(tokenizer, rule).request({"Authorization": "Bearer hunter2"}, user="\U0001f980 ann").client
        for rule in rules
    }
    assert len(clients) == 2, "another server, another name"
    assert not any("hunter2" in client or "ann" in client for client in clients)


def test_a_batch_is_background_work(tokenizer: Tokenizer) -> None:
    door = Door(tokenizer, ServiceRules(interactive=ServiceTargets(1.0, 1.0), background_only=True))
    for tier, reported in ((None, None), ("auto", "flex"), ("default", "flex"), ("flex", "flex")):
        request = door.request(service_tier=tier)
        assert request.service_class is BACKGROUND
        assert request.targets == ServiceTargets()
        assert door.prepared("/v1/completions", service_tier=tier).service_tier == reported
    with pytest.raises(InvalidRequestError) as caught:
        door.request(service_tier="priority")
    assert caught.value.param == "service_tier"


def test_the_default_caller_asks_for_nothing() -> None:
    assert read_caller({}) == Caller()
