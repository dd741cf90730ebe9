"""The store: what goes in comes out, nothing half written is ever a model, nothing of another model fits."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve import file_lock
from jaxserve.checkpoint import convert, open_checkpoint
from jaxserve.checkpoint.orbax_store import MANIFEST_NAME, read_manifest
from jaxserve.errors import CheckpointError
from tests.checkpoint.tiny_files import assert_same, flat_params, tiny_config, write_huggingface
from tests.ordinary_user import ordinary_user


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Two models of one shape with different weights: directory, tensors."""
    root = tmp_path_factory.mktemp("sources")
    return {name: (root / name, write_huggingface(root / name, seed=seed)) for seed, name in enumerate("ab")}


@pytest.fixture(scope="module")
def made(sources, tmp_path_factory):
    return convert(sources["a"][0], tmp_path_factory.mktemp("made") / "model")


@pytest.fixture
def store(made, tmp_path):
    return shutil.copytree(made, tmp_path / "model")


def refuse(path, *mentions):
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path).load_params("float32")
    message = str(caught.value)
    assert "\n" not in message
    for mention in mentions:
        assert mention in message


def edit_manifest(store, change):
    path = store / MANIFEST_NAME
    values = json.loads(path.read_text())
    change(values)
    path.write_text(json.dumps(values))


def data_folders(store):
    return sorted(entry.name for entry in store.iterdir() if entry.name.startswith("data-"))


@pytest.mark.parametrize(
    "changes", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}]
)
def test_the_store_is_the_same_model_as_its_source(tmp_path, changes):
    tensors = write_huggingface(tmp_path / "hf", tiny_config(**changes))
    ours = open_checkpoint(convert(tmp_path / "hf", tmp_path / "deep" / "er" / "model"))
    theirs = open_checkpoint(tmp_path / "hf")
    assert (ours.kind, ours.name, ours.stored_dtype) == ("orbax", "model", "float32")
    assert ours.config == theirs.config
    assert ours.generation == theirs.generation
    messages = [{"role": "user", "content": "hell"}]
    assert ours.load_tokenizer().encode_chat(messages) == theirs.load_tokenizer().encode_chat(messages)
    assert_same(ours.load_params("float32"), tensors)


@pytest.mark.parametrize("stored", [None, "float32", "bfloat16", "float16"])
def test_types_on_disk_and_on_the_device(sources, tmp_path, stored):
    directory, tensors = sources["a"]
    checkpoint = open_checkpoint(convert(directory, tmp_path / "m", dtype=stored))
    assert checkpoint.stored_dtype == (stored or "float32")
    for wanted in ("float32", "bfloat16"):
        params = checkpoint.load_params(wanted)
        assert params["norm"]["scale"].dtype == wanted
        held = {
            n: np.asarray(jax.numpy.asarray(t).astype(stored or "float32").astype(wanted))
            for n, t in tensors.items()
        }
        assert_same(params, held)


def test_an_unknown_type_is_refused(sources, tmp_path):
    with pytest.raises(CheckpointError, match="int8"):
        convert(sources["a"][0], tmp_path / "m", dtype="int8")


def test_arrays_land_where_the_sharding_says(store):
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    everywhere = open_checkpoint(store).load_params("bfloat16", sharding=sharding)
    chosen = open_checkpoint(store).load_params("bfloat16", sharding=lambda spec: sharding)
    for params in (everywhere, chosen):
        assert all(array.sharding == sharding for array in jax.tree.leaves(params))
    default = jax.tree.leaves(open_checkpoint(store).load_params("float32"))
    assert all(array.devices() == {jax.devices()[0]} for array in default)


def test_a_read_only_copy_loads(made, sources):
    open_checkpoint(made).load_params("float32")  # whoever reads the copy may not read what is imported late
    with tempfile.TemporaryDirectory() as name:
        copy = shutil.copytree(made, Path(name) / "model")
        subprocess.run(["chmod", "-R", "a=rX", name], check=True)
        try:
            with ordinary_user():
                with pytest.raises(PermissionError):
                    (copy / "new").touch()
                assert_same(open_checkpoint(copy).load_params("float32"), sources["a"][1])
        finally:
            subprocess.run(["chmod", "-R", "u+w", name], check=True)


def test_a_moved_store_loads(store, sources, tmp_path):
    moved = store.rename(tmp_path / "elsewhere")
    assert_same(open_checkpoint(moved).load_params("float32"), sources["a"][1])


@pytest.mark.parametrize(
    ("change", "mention"),
    [
        ({"num_hidden_layers": 5}, "model.layers.2"),
        ({"num_hidden_layers": 1}, "model.layers.1"),
        ({"hidden_size": 64, "head_dim": 8}, "shape"),
        ({"vocab_size": 300}, "shape"),
        ({"tie_word_embeddings": True}, "lm_head.weight"),
        ({"attention_bias": True}, "q_proj.bias"),
        ({"architectures": ["OtherModel"]}, "OtherModel"),
    ],
)
def test_the_config_of_another_model_is_refused_with_the_differences(store, change, mention):
    edit_manifest(store, lambda values: values["config"].update(change))
    refuse(store, MANIFEST_NAME if "architectures" not in change else str(store), mention)


@pytest.mark.parametrize(
    ("config", "leaves", "mention"),
    [
        ({"num_hidden_layers": 1}, lambda n: "layers.1" not in n, "is not in jaxserve.json"),
        ({"tie_word_embeddings": True}, lambda n: n != "lm_head.weight", "lm_head.weight is not in"),
    ],
)
def test_params_with_more_than_the_manifest_says(store, config, leaves, mention):
    """Config and manifest agree, the checkpoint itself does not: Orbax alone would load a part."""

    def change(values):
        values["config"].update(config)
        values["leaves"] = {name: leaf for name, leaf in values["leaves"].items() if leaves(name)}

    edit_manifest(store, change)
    refuse(store, "params", mention)


@pytest.mark.parametrize("vocab_size", [264, 280])
def test_params_of_another_shape_than_the_manifest_says(store, vocab_size):
    def change(values):
        values["config"]["vocab_size"] = vocab_size
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            values["leaves"][name]["shape"][0] = vocab_size

    edit_manifest(store, change)
    refuse(store, "params", "model.embed_tokens.weight has shape [272, 32]")


def test_params_with_fewer_than_the_manifest_says(store):
    def change(values):
        values["config"]["attention_bias"] = True
        for layer in range(2):
            for name, width in (("q_proj", 32), ("k_proj", 16), ("v_proj", 16), ("o_proj", 32)):
                leaf = {"shape": [width], "dtype": "float32"}
                values["leaves"][f"model.layers.{layer}.self_attn.{name}.bias"] = leaf

    edit_manifest(store, change)
    refuse(store, "params", "q_proj.bias is missing")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"format_version": 1}', '{"format_version": 99}'])
def test_a_damaged_or_newer_manifest_is_named(store, content):
    (store / MANIFEST_NAME).write_text(content)
    refuse(store, MANIFEST_NAME)


@pytest.mark.parametrize("data", ["../other", "", 3, None])
def test_a_manifest_cannot_point_elsewhere(store, data):
    edit_manifest(store, lambda values: values.update(data=data))
    refuse(store, str(store))


def test_every_missing_part_of_the_data_is_noticed(store, made):
    """Delete one file at a time: the load fails in one line, or the file was of no importance and nothing changes."""
    expected = flat_params(open_checkpoint(made).load_params("float32"))
    files = [path.relative_to(store) for path in store.rglob("*") if path.is_file()]
    refused = []
    for relative in files:
        path = store / relative
        content = path.read_bytes()
        path.unlink()
        try:
            assert_same(open_checkpoint(store).load_params("float32"), expected)
        except CheckpointError as error:
            refused.append((relative, str(error)))
        finally:
            path.write_bytes(content)
    assert all("\n" not in message for _, message in refused)
    assert any(path.name == "manifest.ocdbt" for path, _ in refused)
    assert any(path.parent.name == "d" for path, _ in refused)
    shutil.rmtree(store / read_manifest(made).data)
    refuse(store, "the data folder is missing")


def test_truncated_array_data_is_noticed(store):
    largest = max(
        (path for path in store.rglob("d/*") if path.is_file()), key=lambda path: path.stat().st_size
    )
    largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
    refuse(store, "params")


def test_values_that_are_no_numbers_stop_the_load_and_the_conversion(tmp_path):
    tensors = write_huggingface(tmp_path / "hf")
    name = "model.layers.1.mlp.down_proj.weight"
    tensors[name] = tensors[name] * np.float32(1e30)
    write_huggingface(tmp_path / "hf", tensors=tensors)
    assert open_checkpoint(convert(tmp_path / "hf", tmp_path / "m")).load_params("bfloat16")
    with pytest.raises(CheckpointError, match=f"{name}.*float16"):
        convert(tmp_path / "hf", tmp_path / "m", dtype="float16")
    assert open_checkpoint(tmp_path / "m").stored_dtype == "float32"  # the old one is still there


def test_converting_again_replaces_the_model_and_leaves_nothing_behind(store, sources):
    before = data_folders(store)
    convert(sources["b"][0], store)
    assert_same(open_checkpoint(store).load_params("float32"), sources["b"][1])
    assert len(data_folders(store)) == 1
    assert data_folders(store) != before


def test_a_store_can_be_rewritten_in_place_with_another_type(store):
    convert(store, store, dtype="bfloat16")
    assert open_checkpoint(store).stored_dtype == "bfloat16"


@pytest.mark.parametrize("occupied", ["directory", "file", "model"])
def test_a_destination_that_is_something_else_is_left_alone(sources, tmp_path, occupied):
    place = tmp_path / "place"
    if occupied == "file":
        place.write_text("mine")
    elif occupied == "directory":
        place.mkdir()
        (place / "thesis.txt").write_text("mine")
    else:
        write_huggingface(place)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(CheckpointError, match="not a model store"):
        convert(sources["a"][0], place)
    assert sorted(tmp_path.rglob("*")) == before


def test_an_empty_directory_will_do(sources, tmp_path):
    (tmp_path / "m").mkdir()
    assert open_checkpoint(convert(sources["a"][0], tmp_path / "m")).kind == "orbax"


# Run the real conversion in a process that kills itself at one exact point.
KILLED_CONVERSION = """
import os, signal, sys
from jaxserve.checkpoint import convert, orbax_store

def die(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[3] == "data":
    orbax_store.save_tokenizer_files = die  # the weights are written, the rest is not
else:
    os.replace = die  # all is written but for the step that makes it the model
convert(sys.argv[1], sys.argv[2])
"""


@pytest.mark.parametrize(("point", "previous"), [("data", True), ("manifest", True), ("manifest", False)])
def test_a_conversion_that_is_killed_leaves_the_previous_model(sources, store, point, previous):
    if not previous:
        shutil.rmtree(store)
    command = [sys.executable, "-c", KILLED_CONVERSION, str(sources["b"][0]), str(store), point]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == -signal.SIGKILL, process.stderr
    leftovers = len(data_folders(store))
    assert leftovers == 1 + previous  # it did get as far as writing
    if previous:
        assert_same(open_checkpoint(store).load_params("float32"), sources["a"][1])
    else:
        refuse(store, "holds no model")
    convert(sources["b"][0], store)
    assert_same(open_checkpoint(store).load_params("float32"), sources["b"][1])
    assert len(data_folders(store)) == 1


@pytest.mark.parametrize("is_marked", [False, True])
def test_one_replaced_between_opening_and_reading_says_so(store, sources, monkeypatch, is_marked):
    """Its data goes away before the reader has marked it as in use, or right after a writer has looked for marks."""
    opened, shared = open_checkpoint(store), file_lock.shared

    @contextmanager
    def replaced_meanwhile(directory):
        monkeypatch.setattr(file_lock, "shared", shared)  # the writer reads, too
        if not is_marked:
            convert(sources["b"][0], store)
        with shared(directory):
            if is_marked:
                monkeypatch.setattr(file_lock, "in_use", lambda directory: False)
                convert(sources["b"][0], store)
            yield

    monkeypatch.setattr(file_lock, "shared", replaced_meanwhile)
    with pytest.raises(CheckpointError, match="replaced while it was being opened"):
        opened.load_params("float32")


def test_two_conversions_at_once_and_a_reader(store, sources):
    """Whoever is last wins; a reader sees one of the models whole, or is told that it was replaced."""
    failures: list[BaseException] = []

    def write(name):
        try:
            for _ in range(3):
                convert(sources[name][0], store)
        except BaseException as error:
            failures.append(error)

    writers = [threading.Thread(target=write, args=(name,)) for name in "ab"]
    for writer in writers:
        writer.start()
    seen, refusals = 0, []
    while any(writer.is_alive() for writer in writers):
        try:
            found = flat_params(open_checkpoint(store).load_params("float32"))
        except CheckpointError as error:
            refusals.append(str(error))
            continue
        seen += 1
        matches = [
            all(np.array_equal(found[n], t) for n, t in tensors.items()) for _, tensors in sources.values()
        ]
        assert sum(matches) == 1
    for writer in writers:
        writer.join()
    assert not failures
    assert all("replaced" in message or "missing" in message for message in refusals)
    assert seen
    open_checkpoint(store)


def test_data_in_use_are_kept_until_the_next_writer(store, sources):
    old = store / data_folders(store)[0]
    with file_lock.shared(old):
        convert(sources["b"][0], store)
        assert old.is_dir()
    convert(sources["b"][0], store)
    assert len(data_folders(store)) == 1
