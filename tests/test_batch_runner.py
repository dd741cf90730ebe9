from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.batch_runner import MAX_LINE_BYTES, BatchSummary, run_batch, write_unfinished
from jaxserve.config import GenerationDefaults
from jaxserve.llm import LLM
from jaxserve.server.conversion import ServingContext
from jaxserve.tokenizer import Tokenizer
from tests.engine_harness import ServedModel
from tests.server.copy_engine import CopyEngine


@pytest.fixture(scope="session")
def tokenizer(demo_checkpoint_dir: Path) -> Tokenizer:
    from jaxserve.checkpoint import open_checkpoint

    return open_checkpoint(demo_checkpoint_dir).load_tokenizer()


class Batch:
    """A file, an engine, and the command between them."""

    def __init__(self, directory: Path, tokenizer: Tokenizer) -> None:
        self.source = directory / "in.jsonl"
        self.destination = directory / "out.jsonl"
        self.journal = directory / "out.jsonl.partial"
        self.tokenizer = tokenizer
        self.engine = CopyEngine(tokenizer)

    def run(self, data: bytes | list[Any], *, max_in_flight: int = 8, model: str = "copy") -> BatchSummary:
        if isinstance(data, list):
            data = b"".join(json.dumps(line).encode() + b"\n" for line in data)
        self.source.write_bytes(data)
        context = ServingContext(self.tokenizer, GenerationDefaults(), (model,), 2048, self.engine)
        return run_batch(self.engine, context, self.source, self.destination, max_in_flight=max_in_flight)

    @property
    def records(self) -> list[Any]:
        return [json.loads(line) for line in self.destination.read_bytes().splitlines()]


@pytest.fixture
def batch(tmp_path: Path, tokenizer: Tokenizer) -> Batch:
    return Batch(tmp_path, tokenizer)


def completion(custom_id: Any, prompt: Any = "one two three", **fields: Any) -> dict[str, Any]:
    body = {"model": "copy", "prompt": prompt, "max_tokens": 3, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def chat(custom_id: Any, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "hi"}]
    body = {"model": "copy", "messages": messages, "max_tokens": 4, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def text_of(record: Any) -> str:
    choice = record["response"]["body"]["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_answers_stand_in_the_order_of_the_lines(batch: Batch) -> None:
    lines = [completion(f"id{i}", f"{i} and on", max_tokens=1 + (7 * i) % 20) for i in range(100)]
    summary = batch.run([*lines, chat("last", n=2)])
    assert [record["custom_id"] for record in batch.records] == [f"id{i}" for i in range(100)] + ["last"]
    for i, record in enumerate(batch.records[:-1]):
        assert record["error"] is None
        assert record["response"]["status_code"] == 200
        assert text_of(record).startswith(str(i)[:1])
        assert record["response"]["body"]["usage"]["completion_tokens"] == 1 + (7 * i) % 20
    assert len(batch.records[-1]["response"]["body"]["choices"]) == 2
    assert (summary.succeeded, summary.failed) == (101, 0)
    assert summary.completion_tokens == sum(
        record["response"]["body"]["usage"]["completion_tokens"] for record in batch.records
    )
    assert not batch.journal.exists()
    assert sorted(path.name for path in batch.destination.parent.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_every_bad_line_gets_a_record_and_stops_nothing(batch: Batch) -> None:
    good = json.dumps(completion("good")).encode()
    bad: list[tuple[bytes, str | None]] = [
        (b"[1]", None),
        (b"null", None),
        (b"{", None),
        (b'"text"', None),
        (b"\xff\xfe", None),
        (b'{"custom_id": "utf8 \xff"}', None),
        (rb'{"custom_id": "\ud800", "method": "POST", "url": "/v1/completions", "body": {}}', None),
        (b"[" * 100_000, None),
        (json.dumps({**completion("b"), "body": "text"}).encode(), "b"),
        (json.dumps({**completion("c"), "url": "/v1/embeddings"}).encode(), "c"),
        (json.dumps({**completion("d"), "method": "GET"}).encode(), "d"),
        (json.dumps({**completion("e"), "foo": 1}).encode(), "e"),
        (json.dumps(completion("f", stream=True)).encode(), "f"),
        (json.dumps(completion("g", foo=1)).encode(), "g"),
        (json.dumps(completion("h", model="other")).encode(), "h"),
        (json.dumps(completion("i", "word " * 5000)).encode(), "i"),
        (json.dumps(completion("j", temperature=-1)).encode(), "j"),
        (json.dumps(completion("k", logit_bias={"49152": 1})).encode(), "k"),
        (
            rb'{"custom_id": "l", "method": "POST", "url": "/v1/completions", "body": {"model": "\ud83d"}}',
            None,
        ),
        (json.dumps(completion(None)).encode(), None),
        (json.dumps(completion(5)).encode(), None),
        (json.dumps(completion("")).encode(), ""),
        (json.dumps({"method": "POST", "url": "/v1/completions", "body": {}}).encode(), None),
    ]
    data = b"\xef\xbb\xbf" + good + b"\r\n" + b"\n  \n\r\n"
    data += b"".join(line + b"\n" + good + b"\r\n" for line, _ in bad)
    data += good  # no newline at the end
    summary = batch.run(data)
    records = batch.records
    assert (summary.succeeded, summary.failed) == (len(bad) + 2, len(bad))
    assert len(records) == 2 * len(bad) + 2
    failed = [record for record in records if record["error"] is not None]
    for number, (record, (_, custom_id)) in enumerate(zip(failed, bad, strict=True)):
        assert record["custom_id"] == custom_id
        assert record["response"] is None
        assert record["error"]["message"]
        assert record["error"]["line"] == 5 + 2 * number
    assert all(record["error"]["message"].startswith("the line") for record in failed[:8])
    assert failed[8]["error"]["message"].startswith("the body: expected `object`")
    answers = {text_of(record) for record in records if record["error"] is None}
    assert answers == {"one two three"}


def test_a_line_that_is_far_too_long(batch: Batch) -> None:
    good = json.dumps(completion("good")).encode()
    long = b'{"custom_id": "' + b"x" * (3 * MAX_LINE_BYTES) + b'"}'
    summary = batch.run(good + b"\n" + long + b"\n" + good + b"\n")
    assert (summary.succeeded, summary.failed) == (2, 1)
    assert batch.records[1]["error"]["code"] == "line_too_long"
    assert batch.records[1]["error"]["line"] == 2


def test_a_custom_id_used_twice_is_answered_twice_and_counted(batch: Batch) -> None:
    ids = ["same", "other", "same", "ünï🫠", "x" * 10_000, "same"]
    summary = batch.run([completion(custom_id, f"{i} is") for i, custom_id in enumerate(ids)] * 8)
    assert [record["custom_id"] for record in batch.records] == ids * 8
    assert [text_of(record)[0] for record in batch.records] == list("012345") * 8
    assert summary.failed == 0
    assert summary.duplicate_ids == 48 - 4


@pytest.mark.parametrize("data", [b"", b"\n\n", b"\xef\xbb\xbf", b"  "])
def test_a_file_of_nothing_gives_nothing(batch: Batch, data: bytes) -> None:
    summary = batch.run(data)
    assert batch.destination.read_bytes() == b""
    assert (summary.succeeded, summary.failed) == (0, 0)


def test_what_the_engine_could_not_finish_is_an_error_record(batch: Batch) -> None:
    batch.engine.break_next = True
    summary = batch.run([completion("a", n=3), completion("b")], max_in_flight=1)
    assert (summary.succeeded, summary.failed) == (1, 1)
    assert "not finite" in batch.records[0]["error"]["message"]
    assert batch.records[0]["custom_id"] == "a"
    assert not batch.engine.has_work()


def test_a_real_engine_with_a_short_queue_loses_nothing(
    batch: Batch, tiny_model: ServedModel, tokenizer: Tokenizer
) -> None:
    """What was taken of a line before the queue was full goes on while the rest of it waits."""
    engine = tiny_model.engine(max_num_seqs=2, max_waiting=3, max_waiting_tokens=40)
    rng = random.Random(5)
    lines = [
        completion(
            f"id{number}",
            [list(range(10, 10 + rng.randint(1, 12))) for _ in range(rng.randint(1, 2))],
            max_tokens=rng.randint(1, 6),
            seed=number,
            n=rng.randint(1, 2),
        )
        for number in range(40)
    ]
    lines[7]["body"]["slo_ttft_ms"] = 1e-3  # not even an idle engine can do it, once it knows its steps
    lines[20]["body"]["n"] = 6  # more than can ever run and wait together
    batch.source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    context = ServingContext(tokenizer, GenerationDefaults(), ("copy",), 256, engine)
    summary = run_batch(engine, context, batch.source, batch.destination, max_in_flight=1000)
    assert summary.succeeded + summary.failed == len(batch.records) == 40
    assert [record["custom_id"] for record in batch.records] == [f"id{number}" for number in range(40)]
    for number, record in enumerate(batch.records):
        if number in (7, 20):
            continue
        body = lines[number]["body"]
        assert record["error"] is None, record["error"]
        choices = record["response"]["body"]["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(body["prompt"]) * body["n"]))
    assert "n=6" in batch.records[20]["error"]["message"]
    assert batch.records[7]["error"] is None or batch.records[7]["error"]["code"] == "ttft_target"
    assert not engine.has_work()
    engine.check_integrity()


def test_embeddings_stand_among_other_lines(
    batch: Batch, tiny_model: ServedModel, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embeddings in a file are those in Python; a bad line of them stops nothing."""
    engine = tiny_model.engine(max_num_seqs=2, max_waiting=3)
    texts = ["one", "two of them", "a much longer one of several words", "one"]

    def embeddings(custom_id: str, text: Any, **fields: Any) -> dict[str, Any]:
        body = {"model": "copy", "input": text, **fields}
        return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}

    lines = [
        embeddings("list", texts),
        completion("text", [5, 6, 7]),
        embeddings("packed", texts[1], encoding_format="base64"),
        embeddings("empty", ""),
        embeddings("cut", texts[2], dimensions=3),
        embeddings("streamed", texts[2], stream=True),
    ]
    batch.source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    context = ServingContext(tokenizer, GenerationDefaults(), ("copy",), 256, engine, embedding_size=64)
    summary = run_batch(engine, context, batch.source, batch.destination, max_in_flight=8)
    assert (summary.succeeded, summary.failed) == (3, 3)
    assert not engine.has_work()
    listed, text, packed, empty, cut, streamed = batch.records
    body = listed["response"]["body"]
    assert [item["index"] for item in body["data"]] == [0, 1, 2, 3]
    num_tokens = sum(len(tokenizer.encode(one)) for one in texts)
    assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert summary.prompt_tokens == num_tokens + 3 + len(tokenizer.encode(texts[1]))
    assert summary.completion_tokens == text["response"]["body"]["usage"]["completion_tokens"]
    found = np.array([item["embedding"] for item in body["data"]])
    monkeypatch.setattr(engine, "close", lambda: None)  # others still need its model
    with LLM.from_engine(engine) as llm:
        np.testing.assert_allclose(found, llm.embed(texts, progress=False), atol=1e-6)
    raw = base64.b64decode(packed["response"]["body"]["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(raw, "<f4"), found[1], atol=1e-6)
    assert [one["error"]["param"] for one in (empty, cut, streamed)] == ["input", "dimensions", "stream"]


def interrupt_after(batch: Batch, steps: int) -> None:
    """The engine raises KeyboardInterrupt in a later step."""
    step, count = batch.engine.step, [0]

    def counted() -> Any:
        count[0] += 1
        if count[0] > steps:
            raise KeyboardInterrupt
        return step()

    batch.engine.step = counted  # type: ignore[method-assign]


LINES = [completion(f"id{i}", f"{i} and on", max_tokens=3) for i in range(40)]


def test_a_run_goes_on_where_the_last_one_stopped(batch: Batch, tokenizer: Tokenizer) -> None:
    interrupt_after(batch, 10)
    with pytest.raises(KeyboardInterrupt):
        batch.run([completion("bad", temperature=-1), *LINES], max_in_flight=4)
    assert not batch.destination.exists()
    batch.engine = CopyEngine(tokenizer)
    summary = batch.run([completion("bad", temperature=-1), *LINES], max_in_flight=4)
    assert 0 < summary.resumed < 40
    assert len(batch.engine.submitted) == 40 - summary.resumed
    assert (summary.succeeded, summary.failed) == (40, 1)
    assert [record["custom_id"] for record in batch.records] == ["bad"] + [f"id{i}" for i in range(40)]
    assert not batch.journal.exists()


def test_what_interrupted_runs_have_done_holds_a_line_once(batch: Batch, tokenizer: Tokenizer) -> None:
    """A line that had failed was tried again after a restart, and both records were given out."""
    lines = [
        completion("bad", temperature=-1),
        completion("broken"),
        completion("bad", temperature=-1),
        *LINES,
    ]
    batch.engine.break_next = True
    for steps in (5, 5):
        interrupt_after(batch, steps)
        with pytest.raises(KeyboardInterrupt):
            batch.run(lines, max_in_flight=4)
        batch.engine = CopyEngine(tokenizer)
    assert batch.journal.read_bytes().count(b'"bad"') == 4, "tried again"
    write_unfinished(batch.destination)
    ids = [record["custom_id"] for record in batch.records]
    assert ids.count("bad") == 2, "two lines have that name"
    assert len(set(ids)) == len(ids) - 1 < len(lines)
    [broken] = [record for record in batch.records if record["custom_id"] == "broken"]
    assert broken["error"] is None, "the last try counts"
    assert not batch.journal.exists()


def test_a_journal_serves_an_edited_input(batch: Batch, tokenizer: Tokenizer) -> None:
    interrupt_after(batch, 10)
    with pytest.raises(KeyboardInterrupt):
        batch.run([*LINES[:5], *LINES[:5]], max_in_flight=2)
    batch.engine = CopyEngine(tokenizer)
    edited = [completion("new", "new text"), LINES[1], LINES[0], {**LINES[0], "custom_id": "changed"}]
    summary = batch.run(edited)
    assert [record["custom_id"] for record in batch.records] == ["new", "id1", "id0", "changed"]
    assert [text_of(record)[0] for record in batch.records] == ["n", "1", "0", "0"]
    assert summary.resumed == 2


def test_a_torn_or_foreign_journal_is_not_believed(batch: Batch, tokenizer: Tokenizer) -> None:
    interrupt_after(batch, 10)
    with pytest.raises(KeyboardInterrupt):
        batch.run(LINES, max_in_flight=4)
    whole = batch.journal.read_bytes()
    for journal, resumes in (
        (whole[:-5], True),
        (whole + b"\0" * 100 + b"\n", True),
        (whole[:10], False),
        (b"not a journal\n" + whole, False),
    ):
        batch.journal.write_bytes(journal)
        batch.engine = CopyEngine(tokenizer)
        summary = batch.run(LINES)
        assert (summary.resumed > 0) == resumes
        assert [record["custom_id"] for record in batch.records] == [f"id{i}" for i in range(40)]
    batch.journal.write_bytes(whole)
    batch.engine = CopyEngine(tokenizer)
    summary = batch.run([{**line, "body": {**line["body"], "model": "b"}} for line in LINES], model="b")
    assert (summary.resumed, summary.succeeded) == (0, 40)


def test_little_is_in_flight_at_once(batch: Batch) -> None:
    most = 0
    step = batch.engine.step

    def watched() -> Any:
        nonlocal most
        most = max(most, len(batch.engine.submitted) - len(batch.engine.aborted) - done[0])
        outputs = step()
        done[0] += sum(output.finish_reason is not None for output in outputs)
        return outputs

    done = [0]
    batch.engine.step = watched  # type: ignore[method-assign]
    batch.run([completion(str(i)) for i in range(200)], max_in_flight=8)
    assert most == 8
