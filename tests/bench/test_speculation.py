"""What speculation is worth, on a tiny model: what is run and printed (never how fast)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.bench.speculation.report import plot, report, to_json
from jaxserve.bench.speculation.run import ON, Texts, measure_speculation, read_texts
from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError

pytestmark = pytest.mark.usefixtures("quick_to_compile")

REPOSITORY = Path(__file__).resolve().parents[2]
KINDS = (Texts("edit", 0.0, ("a b c a b c a b", "x y x y x y")), Texts("chat", 0.9, ("hello",)))


def test_the_same_streams_with_and_without(tiny_checkpoint_dir: Path, tmp_path: Path) -> None:
    options = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=16,
        max_model_len=256,
        speculative="ngram",
        num_speculative_tokens=3,
        deterministic=True,
    )
    result = measure_speculation(
        str(tiny_checkpoint_dir), options, KINDS, streams=(1, 3), max_tokens=16, repeats=1
    )
    assert [(cell.texts.name, cell.streams) for cell in result.cells] == [
        ("edit", 1), ("edit", 3), ("chat", 1), ("chat", 3),
    ]  # fmt: skip
    for cell in result.cells:
        assert cell.num_equal == cell.num_answers, "speculation changed tokens"
        for one, other in zip(*cell.passes.values(), strict=True):
            assert one.token_ids == other.token_ids
            assert one.draft_tokens == 0
            assert other.accepted_tokens <= other.draft_tokens
            assert other.steps <= one.steps
        assert all(made.decode_tokens <= 15 * cell.num_answers for made in cell.passes[ON])
    facts = json.loads(json.dumps(to_json(result)))
    assert [cell["equal_answers"] for cell in facts["cells"]] == [2, 3, 1, 3]
    assert facts["config"]["speculative"] == "ngram"
    assert len(report(result).splitlines()) == 3 + len(result.cells)
    plot(result, tmp_path / "picture.png")


def test_the_texts_of_the_repository() -> None:
    kinds = {texts.name: texts for texts in read_texts(REPOSITORY / "workloads/speculation.json")}
    assert set(kinds) == {"edit", "chat"}
    assert all(len(texts.messages) >= 6 for texts in kinds.values())


@pytest.mark.parametrize("text", ["", "[]", '{"a": {}}', '{"a": {"temperature": "x", "messages": []}}'])
def test_what_is_no_file_of_texts(tmp_path: Path, text: str) -> None:
    (tmp_path / "texts.json").write_text(text)
    with pytest.raises(ConfigError, match="no file of texts"):
        read_texts(tmp_path / "texts.json")
