"""Programs for a GPU that is not here are kept as those of a device that is."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

COMPILE = """
import sys
from pathlib import Path
from functools import partial
import jax
from jaxserve.device.ahead_of_time import compile_missing, definitions_of
from jaxserve.device.deviceless import identity_of, lowering_for, target_sharding
from jaxserve.device.program_definitions import COPY_BLOCKS, LOAD_ROW, describe_programs
from jaxserve.device.programs import open_cache
from jaxserve.device.targets import TARGETS
from jaxserve.progress import NullProgress
from pallas_kernels.paged_attention import XLA
from tests.device.driver import CONFIG, MODEL
target = TARGETS[sys.argv[2]]
programs = describe_programs(
    MODEL, CONFIG, attention=XLA, num_blocks=9, platform="gpu", sharding=target_sharding(target)
)
cache = open_cache(programs, Path(sys.argv[1]), identity_of(target))
for _ in range(2):
    print(compile_missing(
        definitions_of(programs, [COPY_BLOCKS, LOAD_ROW]), cache, partial(lowering_for, target),
        threads=1, progress=NullProgress(),
    ))
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with JAX's CUDA plugin alone, of the environment that scripts/aot_check makes."""
    place = Path(os.environ.get("JAXSERVE_AOT_VENV", REPOSITORY / ".venv-aot"))
    found = [
        path
        for pattern in ("jax_plugins", "jax_cuda*", "nvidia")
        for path in place.glob(f"lib/python3*/site-packages/{pattern}")
    ]
    if not found:
        pytest.skip("no program was compiled for a GPU: scripts/aot_check makes the environment for that")
    folder = tmp_path_factory.mktemp("plugin")
    for path in found:
        (folder / path.name).symlink_to(path)
    return folder


@pytest.mark.parametrize("target", ["h200", "a100"])
def test_programs_for_a_gpu_are_kept_and_found(plugin: Path, tmp_path: Path, target: str) -> None:
    """That a GPU loads them can't be shown here."""
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{plugin}", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, str(tmp_path / "cache"), target],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["2", "0"], done.stderr
    [folder] = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert {file.name for file in folder.glob("*.bin")} == {"copy_blocks.bin", "load_row.bin"}
    assert "cpu_features" not in (folder / "manifest.json").read_text()
