from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import jaxserve.model_store

SOURCE = Path(jaxserve.model_store.__file__)
SCRIPT = "from jaxserve.model_store import default_store; print(default_store())"


def store_of(installed_in: Path, environment: dict[str, str]) -> str:
    """What a copy of the module says that lies in `installed_in`, run from somewhere else."""
    package = installed_in / "jaxserve"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    shutil.copy(SOURCE, package)
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={"PYTHONPATH": str(installed_in), "HOME": "/somebody", **environment},
        cwd="/",
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "/somebody/.local/share/jaxserve/checkpoints"),
        ({"XDG_DATA_HOME": "/data"}, "/data/jaxserve/checkpoints"),
        ({"JAXSERVE_HOME": "/models", "XDG_DATA_HOME": "/data"}, "/models"),
        ({"JAXSERVE_HOME": ""}, "/somebody/.local/share/jaxserve/checkpoints"),
        ({"JAXSERVE_HOME": "~/models"}, "/somebody/models"),
    ],
)
def test_an_installed_package_keeps_models_with_the_user(
    tmp_path: Path, environment: dict[str, str], expected: str
) -> None:
    assert store_of(tmp_path / "site-packages", environment) == expected


@pytest.mark.parametrize("home", [None, "/models"])
def test_a_checkout_keeps_them_itself_unless_told_otherwise(tmp_path: Path, home: str | None) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "checkpoints").mkdir()
    environment = {} if home is None else {"JAXSERVE_HOME": home}
    assert store_of(tmp_path, environment) == (home or str(tmp_path / "checkpoints"))
