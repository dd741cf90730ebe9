"""The project can be installed from what is written down, and its scripts cope with the machines they meet."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import jaxserve

REPOSITORY = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
REQUIREMENTS = [
    Requirement(line) for line in [*PROJECT["dependencies"], *(line for x in EXTRAS.values() for line in x)]
]
PINS = [
    Requirement(line)
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
]


def bash_scripts() -> list[Path]:
    candidates = [*(REPOSITORY / "scripts").iterdir(), *(REPOSITORY / ".ci").iterdir()]
    return sorted(
        path for path in candidates if path.is_file() and "bash" in path.read_text().partition("\n")[0]
    )


@pytest.mark.parametrize("script", bash_scripts(), ids=lambda path: path.name)
def test_a_script_parses_stops_at_errors_and_is_executable(script: Path) -> None:
    subprocess.run(["bash", "-n", str(script)], check=True)
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()


def test_the_sourced_part_parses() -> None:
    subprocess.run(["bash", "-n", str(REPOSITORY / "scripts" / "setup_env.sh")], check=True)


def test_versions_agree() -> None:
    assert PROJECT["version"] == jaxserve.__version__
    wanted = (REPOSITORY / ".python-version").read_text().strip()
    assert wanted in Requirement(f"python{PROJECT['requires-python']}").specifier
    assert sys.version_info >= tuple(int(part) for part in wanted.split("."))


def test_the_extras_that_the_documentation_names_exist() -> None:
    assert {"cuda12", "cuda13", "demo", "test"} <= set(EXTRAS)


def test_every_requirement_is_pinned_to_a_release_that_it_allows() -> None:
    pinned = {canonicalize_name(pin.name): pin for pin in PINS}
    for requirement in REQUIREMENTS:
        pin = pinned.get(canonicalize_name(requirement.name))
        assert pin is not None, f"{requirement.name} is not in constraints.txt: run scripts/lock"
        [version] = [spec.version for spec in pin.specifier]
        assert version in requirement.specifier, f"{pin} contradicts {requirement}: run scripts/lock"


def test_constraints_are_exact_unique_and_bound_to_no_machine() -> None:
    names = [canonicalize_name(pin.name) for pin in PINS]
    assert len(names) == len(set(names))
    for pin in PINS:
        assert pin.url is None
        assert [spec.operator for spec in pin.specifier] == ["=="], pin


def test_torch_is_no_part_of_it() -> None:
    for requirement in [*REQUIREMENTS, *PINS]:
        assert not canonicalize_name(requirement.name).startswith("torch")


def test_the_console_command_is_the_one_that_python_m_runs() -> None:
    module, _, name = PROJECT["scripts"]["jaxserve"].partition(":")
    assert f"from {module} import {name}" in (REPOSITORY / "jaxserve" / "__main__.py").read_text()


def find_python(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    tools = {tool: shutil.which(tool) for tool in ("bash", "dirname", "sed")}
    path = os.pathsep.join(
        [environment.pop("PATH_FIRST", ""), *{str(Path(tool).parent) for tool in tools.values() if tool}]
    )
    command = f'set -euo pipefail; source "{REPOSITORY}/scripts/setup_env.sh"; find_python'
    return subprocess.run(
        ["bash", "-c", command],
        env={"PATH": path.lstrip(os.pathsep), "HOME": "/nonexistent", **environment},
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )


def fake_command(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def runs_a_new_enough_python(command: str) -> bool:
    code = "import sys; print(sys.version_info >= (3, 12))"
    return subprocess.run([command, "-c", code], capture_output=True, text=True).stdout.strip() == "True"


def test_a_python_that_was_asked_for_is_taken() -> None:
    result = find_python({"PYTHON": sys.executable})
    assert (result.returncode, result.stdout) == (0, sys.executable + "\n"), result.stderr


@pytest.mark.parametrize("text", ["#!/bin/sh\nexit 127\n", None], ids=["broken", "missing"])
def test_an_unusable_python_that_was_asked_for_is_refused_in_one_line(
    tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        fake_command(tmp_path / "python", text)
    result = find_python({"PYTHON": str(tmp_path / "python")})
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.fullmatch(r"error: PYTHON=.*3\.12.*\n", result.stderr)


@pytest.mark.parametrize("root", ["PYENV_ROOT", "HOME"])
def test_a_python_is_found_behind_a_shim_whose_version_is_not_active(tmp_path: Path, root: str) -> None:
    """pyenv puts python3.12 on the PATH even where running it only prints an error."""
    fake_command(
        tmp_path / "shims" / "python3.12", "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"
    )
    versions = tmp_path / ("versions" if root == "PYENV_ROOT" else ".pyenv/versions")
    minor = f"{sys.version_info[0]}.{sys.version_info[1]}"
    fake_command(versions / f"{minor}.9" / "bin" / "python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    result = find_python({"PATH_FIRST": str(tmp_path / "shims"), root: str(tmp_path)})
    assert result.returncode == 0, result.stderr
    assert runs_a_new_enough_python(result.stdout.strip())


@pytest.mark.parametrize(
    "arguments",
    [["--port", "http"], ["--port", "0"], ["--port=70000"], ["--prot", "1"], ["--port"], ["extra"]],
)
def test_quickstart_refuses_bad_options_before_it_does_anything(arguments: list[str], tmp_path: Path) -> None:
    environment = {**os.environ, "JAXSERVE_VENV": str(tmp_path / "venv")}
    script = str(REPOSITORY / "scripts" / "quickstart")
    result = subprocess.run(
        [script, *arguments], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert result.returncode == 2
    assert re.fullmatch(r"error: .*\n", result.stderr)
    assert not (tmp_path / "venv").exists()
