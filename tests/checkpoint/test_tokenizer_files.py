"""Tokenizer directories: needed files are named when they are missing or damaged, optional ones have defaults."""

from __future__ import annotations

import json

import pytest
from tokenizers import processors

from jaxserve.checkpoint import open_checkpoint
from jaxserve.checkpoint.tokenizer_files import load_tokenizer_files, save_tokenizer_files
from jaxserve.errors import CheckpointError
from tests.checkpoint.tiny_files import (
    CHAT_TEMPLATE,
    assert_same,
    byte_vocab,
    tiny_config,
    tiny_tokenizer,
    write_huggingface,
    write_json,
)


@pytest.fixture
def model(tmp_path):
    write_huggingface(tmp_path / "m")
    return tmp_path / "m"


def refuse(directory, *mentions):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(directory).load_tokenizer()
    message = str(caught.value)
    assert "\n" not in message
    for mention in mentions:
        assert mention in message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_needed_file_that_is_missing_is_named(model, name):
    (model / name).unlink()
    refuse(model, name, "missing")


@pytest.mark.parametrize(
    "name", ["tokenizer_config.json", "special_tokens_map.json", "generation_config.json"]
)
def test_a_model_without_an_optional_file_still_opens(model, name):
    (model / name).unlink()
    checkpoint = open_checkpoint(model)
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert 258 in checkpoint.generation.eos_token_ids  # at least config.json says so
    assert tokenizer.has_chat_template == (name != "tokenizer_config.json")


def test_a_model_with_none_of_the_optional_files(model):
    for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"):
        (model / name).unlink()
    checkpoint = open_checkpoint(model)
    assert checkpoint.generation.eos_token_ids == (258,)
    assert checkpoint.load_tokenizer().encode("hell") == [byte_vocab().index("hell")]


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "generation_config.json",
    ],
)
@pytest.mark.parametrize("damage", ["half", "empty", "list", "binary", "directory"])
def test_a_damaged_file_is_named(model, name, damage):
    path = model / name
    content = path.read_bytes()
    if damage == "directory":  # what can't be read at all, whoever runs the test
        path.unlink()
        path.mkdir()
    else:
        path.write_bytes(
            {"half": content[: len(content) // 2], "empty": b"", "list": b"[1]", "binary": b"\xff\xfe\x00"}[
                damage
            ]
        )
    refuse(model, name)


def test_valid_json_that_is_no_tokenizer_is_named(model):
    write_json(model / "tokenizer.json", {"version": "1.0", "model": {"type": "Nothing"}})
    refuse(model, "tokenizer.json")


def test_more_ids_than_the_model_has_are_refused(model):
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([f"extra{index}" for index in range(20)])
    tokenizer.save(str(model / "tokenizer.json"))
    refuse(model, "ids up to", "271")


def test_fewer_ids_than_the_model_has_are_padding(model):
    assert open_checkpoint(model).load_tokenizer().vocab_size <= 272


@pytest.mark.parametrize("key", ["bos_token", "eos_token"])
def test_a_named_token_outside_the_vocabulary_is_refused(model, key):
    write_json(model / "tokenizer_config.json", {key: "<nowhere>"})
    refuse(model, key, "<nowhere>")


@pytest.mark.parametrize("place", ["config", "named", "jinja", "json"])
def test_a_chat_template_in_any_place(model, place):
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    if place == "config":
        config["chat_template"] = CHAT_TEMPLATE
    elif place == "named":
        other = {"name": "tool_use", "template": "{{ 'no' }}"}
        config["chat_template"] = [other, {"name": "default", "template": CHAT_TEMPLATE}]
    elif place == "jinja":
        config["chat_template"] = "{{ 'the separate file wins' }}"
        (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    else:
        write_json(model / "chat_template.json", {"chat_template": CHAT_TEMPLATE})
    write_json(model / "tokenizer_config.json", config)
    tokenizer = open_checkpoint(model).load_tokenizer()
    assert tokenizer.encode_chat([{"role": "user", "content": "hell"}]) == [
        257,
        byte_vocab().index("hell"),
        258,
    ]


@pytest.mark.parametrize(
    "name",
    ["chat_template.jinja", "chat_template.json", "tokenizer_config.json", "special_tokens_map.json"],
)
def test_a_link_that_leads_nowhere_is_no_file_left_out(model, name):
    """As a download that broke off leaves it: the model would chat in another form, or not at all."""
    (model / name).unlink(missing_ok=True)
    (model / name).symlink_to(model / "gone")
    refuse(model, name)


def test_a_chat_template_with_a_syntax_error_is_refused(model):
    (model / "chat_template.jinja").write_text("{% for m in messages %}")
    refuse(model, "template")


def test_a_chat_template_of_the_wrong_kind_is_refused(model):
    write_json(model / "tokenizer_config.json", {"chat_template": 3})
    refuse(model, "chat_template")


@pytest.mark.parametrize("processor", [False, True])
@pytest.mark.parametrize("wanted", [None, False, True])
def test_who_decides_about_bos(tmp_path, processor, wanted):
    """`add_bos_token` where it is given, the post-processor otherwise; never two of them."""
    backend = tiny_tokenizer()
    if processor:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<s>"} if wanted is None else {"bos_token": "<s>", "add_bos_token": wanted}
    write_json(tmp_path / "tokenizer_config.json", config)
    parts = load_tokenizer_files(tmp_path)
    expected = processor if wanted is None else wanted
    assert parts.add_bos == expected
    assert parts.backend.encode("hell").ids == [257] * expected + [byte_vocab().index("hell")]


def test_vocab_and_merges_alone_are_converted(model):
    backend = tiny_tokenizer()
    (model / "tokenizer.json").unlink()
    content = json.loads(backend.to_str())["model"]
    write_json(model / "vocab.json", content["vocab"])
    lines = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["merges"]]
    (model / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    write_json(
        model / "tokenizer_config.json",
        {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    )
    tokens = open_checkpoint(model).load_tokenizer().encode("hell yes", add_special_tokens=False)
    assert tokens == backend.encode("hell yes").ids


def test_a_sentencepiece_file_that_cannot_be_converted_is_named(model):
    (model / "tokenizer.json").unlink()
    (model / "tokenizer.model").write_bytes(b"not sentencepiece")
    write_json(model / "tokenizer_config.json", {"tokenizer_class": "LlamaTokenizer"})
    refuse(model, "no tokenizer.json")


def test_saving_and_loading_again_gives_the_same_tokenizer(model, tmp_path):
    parts = load_tokenizer_files(model)
    save_tokenizer_files(parts, tmp_path / "copy")
    again = load_tokenizer_files(tmp_path / "copy")
    assert again.backend.to_str() == parts.backend.to_str()
    for name in ("chat_template", "bos_token", "eos_token", "add_bos", "other_special"):
        assert getattr(again, name) == getattr(parts, name)


def test_the_tokenizers_eos_ends_a_reply(tmp_path):
    tensors = write_huggingface(tmp_path, tiny_config(eos_token_id=None))
    (tmp_path / "generation_config.json").unlink()
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.generation.eos_token_ids == (258,)
    assert_same(checkpoint.load_params("float32"), tensors)
