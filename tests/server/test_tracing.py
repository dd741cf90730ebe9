"""Spans as a collector receives them, over HTTP from the real exporter."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from jaxserve.errors import ConfigError
from jaxserve.server.tracing import Tracing
from jaxserve.tokenizer import Tokenizer
from tests.cli.command import run_jaxserve
from tests.server import http
from tests.server.copy_engine import CopyEngine
from tests.server.running_server import RunningServer
from tests.server_process import REPOSITORY

COMPLETIONS = "/v1/completions"
BODY = {"model": "copy", "prompt": "Hello world", "max_tokens": 4, "temperature": 0.5}
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes OTLP over HTTP."""

    def __init__(self) -> None:
        self.requests: list[ExportTraceServiceRequest] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                data = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    data = gzip.decompress(data)
                collector.requests.append(ExportTraceServiceRequest.FromString(data))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def spans(self) -> list[Any]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]


@pytest.fixture
def collector() -> Iterator[Collector]:
    made = Collector()
    yield made
    made.close()


def attributes(span: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        kind = value.WhichOneof("value")
        found = getattr(value, kind)
        return [plain(one) for one in found.values] if kind == "array_value" else found

    return {one.key: plain(one.value) for one in span.attributes}


def run(
    tokenizer: Tokenizer, collector: Collector, *requests: tuple[dict[str, Any], dict[str, str]]
) -> list[Any]:
    """Replies to bodies with headers; when it returns, the spans are there."""
    with RunningServer(
        CopyEngine(tokenizer, step_seconds=0.002), extensions=[Tracing(collector.url)]
    ) as server:
        http.request(server.base_url, "GET", "/v1/models")
        return [http.post(server.base_url, COMPLETIONS, body, headers=headers) for body, headers in requests]


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_a_span_with_its_phases(
    tokenizer: Tokenizer, collector: Collector, stream: bool
) -> None:
    body = {**BODY, "n": 2, "stream": stream}
    (reply,) = run(tokenizer, collector, (body, {"X-Request-Id": "mine"}))
    assert reply.status == 200
    (root,) = [span for span in collector.spans if span.name == "llm_request"]
    seen = attributes(root)
    prompt = len(tokenizer.encode("Hello world"))
    expected = {
        "gen_ai.request.id": "mine",
        "gen_ai.request.model": "copy",
        "gen_ai.response.model": "copy",
        "gen_ai.operation.name": "text_completion",
        "gen_ai.request.n": 2,
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.usage.input_tokens": prompt,
        "gen_ai.usage.prompt_tokens": prompt,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.usage.completion_tokens": 8,
        "gen_ai.response.finish_reasons": ["length"],
        "http.response.status_code": 200,
    }
    assert expected.items() <= seen.items()
    total = seen["gen_ai.latency.e2e"]
    assert 0 <= seen["gen_ai.latency.time_in_queue"] <= seen["gen_ai.latency.time_to_first_token"] <= total
    inference = seen["gen_ai.latency.time_in_model_prefill"] + seen["gen_ai.latency.time_in_model_decode"]
    assert seen["gen_ai.latency.time_in_model_inference"] == pytest.approx(inference)

    children = [span for span in collector.spans if span.parent_span_id == root.span_id]
    assert len(children) == len(collector.spans) - 1 == 2 * 3
    for index in range(2):
        mine = [span for span in children if attributes(span)["gen_ai.choice.index"] == index]
        assert [span.name for span in mine] == ["queue", "prefill", "decode"]
        moments = [root.start_time_unix_nano]
        for span in mine:
            assert span.trace_id == root.trace_id
            assert span.start_time_unix_nano >= moments[-1]
            moments += [span.start_time_unix_nano, span.end_time_unix_nano]
        assert moments == sorted(moments)
        assert moments[-1] <= root.end_time_unix_nano
    (resource,) = {
        attributes(one.resource)["service.name"] for sent in collector.requests for one in sent.resource_spans
    }
    assert resource == "jaxserve"


def test_the_callers_trace_is_gone_on_with(tokenizer: Tokenizer, collector: Collector) -> None:
    replies = run(
        tokenizer,
        collector,
        (BODY, {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=1"}),
        (BODY, {"traceparent": f"00-{TRACE}-{SPAN}-00"}),  # not sampled
        (BODY, {"traceparent": "00-zzz\xe9-1-01"}),  # none
    )
    assert [reply.status for reply in replies] == [200] * 3
    traced, own = [span for span in collector.spans if span.name == "llm_request"]
    assert (traced.trace_id.hex(), traced.parent_span_id.hex()) == (TRACE, SPAN)
    assert traced.trace_state == "vendor=1"
    assert own.trace_id.hex() != TRACE
    assert not own.parent_span_id


def test_errors_are_marked(tokenizer: Tokenizer, collector: Collector) -> None:
    run(tokenizer, collector, ({**BODY, "model": "other"}, {}), ({**BODY, "temperature": "hot"}, {}))
    first, second = collector.spans
    assert (attributes(first)["error.type"], first.status.code) == ("model_not_found", 2)
    assert (attributes(second)["http.response.status_code"], second.status.code) == (400, 2)


def test_no_text_is_in_a_span(tokenizer: Tokenizer, collector: Collector) -> None:
    run(tokenizer, collector, ({**BODY, "prompt": "xyzzy", "user": "xyzzy", "stop": ["xyzzy"]}, {}))
    assert collector.requests
    assert all(b"xyzzy" not in sent.SerializeToString() for sent in collector.requests)


def test_a_collector_that_is_not_there_hurts_nobody(
    tokenizer: Tokenizer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "1")
    collector.close()
    (reply,) = run(tokenizer, collector, (BODY, {}))
    assert reply.status == 200


def test_a_url_is_needed() -> None:
    with pytest.raises(ConfigError, match="http"):
        Tracing("localhost:4317")


def test_without_the_extra_the_command_says_so(tmp_path: Path) -> None:
    """Exporters that fail to import stand before the real ones."""
    folder = tmp_path / "opentelemetry" / "exporter"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise ImportError('not installed')\n")
    result = run_jaxserve(
        *(
            "serve",
            "--model",
            "smollm2",
            "--port",
            "0",
            "--otlp-traces-endpoint",
            "http://127.0.0.1:1/v1/traces",
        ),
        environment={"PYTHONPATH": f"{tmp_path}:{REPOSITORY}"},
    )
    assert result.returncode == 2, result.stderr
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: ")
    assert "jaxserve[otel]" in line
