"""What all tests share: a CPU backend, one compile cache a session, and two models on disk."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.engine_harness import ServedModel

REPOSITORY = Path(__file__).resolve().parents[1]

# jax reads this once, when it is first imported, and so do the server processes that tests start.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Engines keep compiled programs in the user's cache folder. Tests share one of their own, which dies with the session:
# the second engine of a shape starts quickly, and no test passes or fails by what an earlier run has left. Where
# tests run in several processes, those are children of the one that made it.
_IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if not _IS_WORKER:
    _USER_CACHE = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    os.environ.setdefault(
        "PIP_CACHE_DIR", str(Path(_USER_CACHE) / "pip")
    )  # what pip has fetched stays useful
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="jaxserve-test-cache-")
_SESSION_CACHE = os.environ["XDG_CACHE_HOME"]

hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config: pytest.Config) -> None:
    # A shell starts background jobs with Ctrl-C ignored, and they pass that on; tests of Ctrl-C need it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    if not _IS_WORKER:
        shutil.rmtree(_SESSION_CACHE, ignore_errors=True)


@pytest.fixture(scope="session")
def compile_cache_dir() -> Path:
    """Where engines of this session, and of the processes it starts, keep compiled programs by default."""
    return Path(_SESSION_CACHE) / "jaxserve" / "executables"


@pytest.fixture(scope="module")
def quick_to_compile() -> Iterator[None]:
    """What this module's tests, and the processes they start, compile is hardly optimised: a third less work.

    For tests that compare with a tolerance, or programs with their like; not where optimised code must be exact. Not
    with models of the session, which other modules want optimised.
    """
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
        jax.config.update("jax_disable_most_optimizations", True)
        yield
    jax.config.update("jax_disable_most_optimizations", False)


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


@pytest.fixture(scope="session")
def tiny_model() -> Iterator[ServedModel]:
    """A small random model on the device, every shape compiled; tests make their own engines around it."""
    from tests.engine_harness import serve_tiny
    from tests.text_models import smollm2

    served = serve_tiny(smollm2(), Path(_SESSION_CACHE) / "jaxserve" / "executables")
    yield served
    served.close()


@pytest.fixture(scope="session")
def demo_model(demo_checkpoint_dir: Path) -> Iterator[ServedModel]:
    """The same with SmolLM2-135M-Instruct in float32."""
    from tests.engine_harness import serve_demo

    served = serve_demo(demo_checkpoint_dir, Path(_SESSION_CACHE) / "jaxserve" / "executables")
    yield served
    served.close()
