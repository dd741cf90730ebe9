"""What all tests share: a CPU backend, one compile cache a session, and two models on disk."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# jax reads these once, when it is first imported, and so do the server processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
_OWN_COMPILE_CACHE: str | None = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _OWN_COMPILE_CACHE = tempfile.mkdtemp(prefix="jaxserve-test-compile-cache-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _OWN_COMPILE_CACHE
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_unconfigure(config: pytest.Config) -> None:
    if _OWN_COMPILE_CACHE is not None:
        shutil.rmtree(_OWN_COMPILE_CACHE, ignore_errors=True)


@pytest.fixture(scope="session")
def compile_cache_dir() -> Path:
    """Where this session's executables are kept, so that a second engine of the same shape starts quickly."""
    return Path(os.environ["JAX_COMPILATION_CACHE_DIR"])


@pytest.fixture(scope="session")
def demo_checkpoint_dir() -> Path:
    """The Orbax store of SmolLM2-135M-Instruct, fetched and converted into checkpoints/ on first use."""
    from jaxserve.checkpoint import resolve_model

    return resolve_model("smollm2", store=REPOSITORY / "checkpoints")


@pytest.fixture(scope="session")
def tiny_huggingface_dir(demo_checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face directory with two layers of random weights and the demo model's vocabulary."""
    from tests.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("huggingface") / "tiny", demo_checkpoint_dir)


@pytest.fixture(scope="session")
def tiny_checkpoint_dir(tiny_huggingface_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as an Orbax store: loads and compiles in seconds."""
    from jaxserve.checkpoint import convert

    return convert(tiny_huggingface_dir, tmp_path_factory.mktemp("store") / "tiny")
