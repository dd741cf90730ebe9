"""`POST /v1/embeddings` of a real server: what clients of OpenAI's API rely on."""

from __future__ import annotations

import base64
import struct
from typing import Any

import numpy as np
import openai
import pytest

from tests.server import http

PATH = "/v1/embeddings"


def body(text: Any = "The quick brown fox", **fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "input": text, **fields}


def vectors(api_url: str, text: Any, **fields: Any) -> np.ndarray:
    reply = http.post(api_url, PATH, body(text, **fields))
    assert reply.status == 200, reply.body
    assert reply.json["object"] == "list"
    assert reply.json["model"] == "tiny"
    assert [item["index"] for item in reply.json["data"]] == list(range(len(reply.json["data"])))
    return np.array([item["embedding"] for item in reply.json["data"]])


def tokens_of(api_url: str, text: str) -> list[int]:
    ids: list[int] = http.post(api_url, "/tokenize", {"prompt": text}).json["tokens"]
    return ids


def test_openai_client(api_url: str) -> None:
    """It asks for base64 of its own accord, and decodes it."""
    client = openai.OpenAI(base_url=f"{api_url}/v1", api_key="none", max_retries=0)
    texts = ["one", "two of them", "one"]
    answer = client.embeddings.create(model="tiny", input=texts, user="someone")
    found = np.array([item.embedding for item in answer.data])
    assert found.shape == (3, 64)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(found[0], found[2], atol=1e-6)
    assert not np.allclose(found[0], found[1], atol=1e-2)
    num_tokens = sum(len(tokens_of(api_url, text)) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (num_tokens, num_tokens)
    plain = client.embeddings.create(model="tiny", input=texts, encoding_format="float", dimensions=64)
    np.testing.assert_allclose([item.embedding for item in plain.data], found, atol=1e-6)


def test_all_kinds_of_input_are_the_same(api_url: str) -> None:
    text = "The quick brown fox"
    ids = tokens_of(api_url, text)
    expected = vectors(api_url, text)
    assert expected.shape == (1, 64)
    for same in ([text], ids, [ids]):
        np.testing.assert_allclose(vectors(api_url, same), expected, atol=1e-6)
    packed = http.post(api_url, PATH, body(text, encoding_format="base64")).json["data"][0]["embedding"]
    np.testing.assert_allclose(struct.unpack("<64f", base64.b64decode(packed)), expected[0], atol=1e-6)
    longer = [*ids, *range(500, 600)]
    np.testing.assert_allclose(
        vectors(api_url, longer, truncate_prompt_tokens=100), vectors(api_url, longer[-100:]), atol=1e-6
    )
    whole = vectors(api_url, ids * 1000, truncate_prompt_tokens=-1)
    np.testing.assert_allclose(whole, vectors(api_url, (ids * 1000)[-1024:]), atol=1e-6)
    assert vectors(api_url, "word " * 3000, truncate_prompt_tokens=5).shape == (1, 64)


def test_many_at_once_in_every_class(api_url: str) -> None:
    texts = [f"text {index} " * (1 + index % 7) for index in range(40)]
    together = vectors(api_url, texts, service_tier="flex", priority=3)
    for index in (0, 6, 39):
        np.testing.assert_allclose(vectors(api_url, texts[index])[0], together[index], atol=2e-6)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 32}, "dimensions"),
        ({"dimensions": 0}, "dimensions"),
        ({"encoding_format": "int8"}, "encoding_format"),
        ({"input": []}, "input"),
        ({"input": ""}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": ["a", 1]}, "input"),
        ({"input": [[]]}, "input"),
        ({"input": [49152]}, "input"),
        ({"input": [-1]}, "input"),
        ({"input": None}, "input"),
        ({"input": [5] * 1025}, "input"),
        ({"input": "word " * 3000}, "input"),
        ({"input": ["a"] * 2049}, "input"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1025}, "truncate_prompt_tokens"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"service_tier": "gold"}, "service_tier"),
        ({"slo_ttft_ms": -1}, "slo_ttft_ms"),
        ({"stream": True}, "stream"),
        ({"slo_itl_ms": 5}, "slo_itl_ms"),
    ],
)
def test_refusals_name_the_field(api_url: str, fields: dict[str, Any], param: str) -> None:
    reply = http.post(api_url, PATH, {**body(), **fields})
    assert reply.status == 400, reply.body
    assert reply.json["error"]["param"] == param


def test_unknown_model(api_url: str) -> None:
    assert http.post(api_url, PATH, body(model="other")).status == 404


def test_as_many_tokens_as_the_context_holds(api_url: str) -> None:
    """No room is needed for an answer."""
    assert vectors(api_url, [5] * 1024).shape == (1, 64)
