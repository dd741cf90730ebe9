"""The demo model behind the real server: that what comes out makes sense, seen with the openai client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal

import anthropic
import openai
import pydantic
import pytest

from tests.server import http
from tests.server_process import QUICK_TO_RUN, ServerProcess


@pytest.fixture(scope="module")
def demo_url(demo_checkpoint_dir: Path) -> Iterator[str]:
    flags = ("--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--max-model-len", "1024")
    flags += ("--speculative", "ngram", "--num-speculative-tokens", "7")
    with ServerProcess(
        *(demo_checkpoint_dir, "--served-model-name", "demo", *flags),
        environment=QUICK_TO_RUN,
        start_timeout_s=900,
    ) as server:
        yield server.base_url


def test_a_chat_knows_the_capital_of_france(demo_url: str) -> None:
    client = openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0)
    question: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
        "max_completion_tokens": 40,
    }
    answer = client.chat.completions.create(**question).choices[0]
    assert answer.message.content is not None
    assert "Paris" in answer.message.content
    assert answer.finish_reason == "stop", "its own end of turn ended it"
    chunks = list(client.chat.completions.create(**question, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason] == ["stop"]


def test_emoji_are_copied_whole(demo_url: str) -> None:
    line = "🫠🥹🦩🪿龜\n"
    body = {"model": "demo", "prompt": line * 12, "temperature": 0, "max_tokens": 36}
    whole = http.post(demo_url, "/v1/completions", body).json["choices"][0]["text"]
    chunks = http.stream(demo_url, "/v1/completions", body)
    assert whole.startswith(line)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole
    for chunk in chunks[:-1]:
        assert "\ufffd" not in chunk["choices"][0]["text"]


def test_a_system_prompt_counts(demo_url: str) -> None:
    def answer(*system: str) -> str:
        messages = [{"role": "system", "content": text} for text in system]
        messages.append({"role": "user", "content": "Who are you?"})
        body = {"model": "demo", "messages": messages, "temperature": 0, "max_tokens": 20}
        return http.post(demo_url, "/v1/chat/completions", body).json["choices"][0]["message"]["content"]

    assert answer("You are a pirate named Redbeard. Always say your name.") != answer()


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    name: Annotated[str, pydantic.Field(max_length=20)]
    age: Annotated[int, pydantic.Field(ge=0, le=150)]
    mood: Literal["happy", "sad"]


def test_answers_have_the_form_that_was_asked_for(demo_url: str) -> None:
    """By the client's own parsing, in all three dialects; whole and streamed, at any temperature, with drafts."""
    client = openai.OpenAI(base_url=f"{demo_url}/v1", api_key="none", max_retries=0)
    ask: dict[str, Any] = {
        "model": "demo",
        "messages": [{"role": "user", "content": "Describe Anna, a happy woman of 31, as JSON."}],
        "max_completion_tokens": 120,
    }
    for more in ({"temperature": 0}, {"temperature": 1.2, "seed": 3}, {"n": 3, "seed": 4}):
        for choice in client.chat.completions.parse(**ask, **more, response_format=Person).choices:
            assert choice.finish_reason == "stop"
            assert isinstance(choice.message.parsed, Person)
    schema = Person.model_json_schema()
    chunks = client.chat.completions.create(
        **ask,
        temperature=0,
        stream=True,
        response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema}},
    )
    Person.model_validate_json("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
    response = client.responses.parse(model="demo", input="Describe Anna.", text_format=Person)
    assert isinstance(response.output_parsed, Person)
    message = anthropic.Anthropic(base_url=demo_url, api_key="none", max_retries=0).messages.create(
        model="demo",
        max_tokens=120,
        messages=[{"role": "user", "content": "Describe Anna."}],
        output_config={"format": {"type": "json_schema", "schema": schema}},
    )
    assert message.content[0].type == "text"
    Person.model_validate_json(message.content[0].text)


def test_a_bad_form_is_refused_beside_good_ones(demo_url: str) -> None:
    """B160, B161, B162: by its name, again and again; streams go on, and so does the server."""
    good = {"model": "demo", "prompt": "Numbers:", "structured_outputs": {"regex": "[0-9]{3,20}"}, "seed": 1}
    before = http.post(demo_url, "/v1/completions", good).json["choices"][0]["text"]
    with ThreadPoolExecutor() as pool:
        stream = pool.submit(
            lambda: list(
                http.stream(demo_url, "/v1/completions", {"model": "demo", "prompt": "Hi", "max_tokens": 60})
            )
        )
        for _ in range(2):
            for field, value in (
                ("regex", "("),
                ("regex", "a{1000}{1000}"),
                ("json", {"type": "thing"}),
                ("json", "{"),
                ("grammar", 'a: "b"'),
            ):
                answer = http.post(
                    demo_url, "/v1/completions", {**good, "structured_outputs": {field: value}}
                )
                assert answer.status == 400
                assert answer.json["error"]["param"] == f"structured_outputs.{field}"
                assert http.post(demo_url, "/v1/completions", good).json["choices"][0]["text"] == before
        assert len(stream.result()) > 10


PLACES = "Oslo, Bern, Riga, Rome, Lima. "


def test_drafts_change_nothing_but_the_number_of_steps(demo_url: str) -> None:
    """A text that repeats itself, streamed and not, to its length and to a stop string."""
    for more in (
        {},
        {"stop": ["Rome"]},
        {"temperature": 0.8, "seed": 5},
        {"n": 2, "temperature": 0.8, "seed": 6},
    ):
        body = {
            "model": "demo",
            "prompt": PLACES * 6,
            "temperature": 0,
            "max_tokens": 40,
            "logprobs": 2,
            **more,
        }
        before = _draft_counters(demo_url)
        off = http.post(demo_url, "/v1/completions", {**body, "speculative_tokens": 0}).json
        assert _draft_counters(demo_url) == before
        on = http.post(demo_url, "/v1/completions", {**body, "speculative_tokens": 7}).json
        for one, other in zip(off["choices"], on["choices"], strict=True):
            assert (one["text"], one["finish_reason"]) == (other["text"], other["finish_reason"])
            assert one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
            for name in ("token_logprobs", "top_logprobs"):
                assert _flat(one["logprobs"][name]) == pytest.approx(_flat(other["logprobs"][name]), abs=1e-3)
        details = on["usage"].pop("completion_tokens_details")
        for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert on["usage"][name] == off["usage"][name], "usage counts what was returned"
        accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
        assert 0 < accepted <= on["usage"]["completion_tokens"]
        after = _draft_counters(demo_url)
        assert after["num_draft_tokens"] - before["num_draft_tokens"] == accepted + rejected
        assert after["num_drafts"] > before["num_drafts"]
        chunks = http.stream(demo_url, "/v1/completions", body)
        for index, choice in enumerate(on["choices"]):
            pieces = [c["choices"][0]["text"] for c in chunks if c["choices"][0]["index"] == index]
            assert "".join(pieces) == choice["text"]


def _draft_counters(url: str) -> dict[str, float]:
    found = {}
    for line in http.request(url, "GET", "/metrics").body.decode().splitlines():
        if line.startswith("vllm:spec_decode_num_"):
            name, _, value = line.removeprefix("vllm:spec_decode_").partition("{")
            found[
                name.removesuffix("_total")
                + (value.split("position=")[1][:3] if "position=" in value else "")
            ] = float(line.rsplit(" ", 1)[1])
    assert found["num_accepted_tokens"] == sum(v for k, v in found.items() if "per_pos" in k)
    return found


def _flat(values: Any) -> list[float]:
    """Of a list of numbers, or of alternatives by token."""
    if isinstance(values[0], dict):
        return [number for alternatives in values for number in sorted(alternatives.values())]
    return list(values)


@pytest.mark.parametrize("value", [-1, 65, 1.5, "2", True])
def test_a_bad_number_of_drafts_is_refused_by_name(demo_url: str, value: Any) -> None:
    body = {"model": "demo", "prompt": "x", "max_tokens": 1, "speculative_tokens": value}
    answer = http.post(demo_url, "/v1/completions", body)
    assert answer.status == 400
    assert answer.error["param"] == "speculative_tokens"
