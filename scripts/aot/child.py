"""One case in a process of its own:   python -m scripts.aot.child CASE FOLDER RESULT

CASE is a case's name, FOLDER where dumps go (`dumps.environment` must be in force), RESULT the JSON file to write.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jaxserve.device.targets import TARGETS
from scripts.aot.cases import KernelCase, StepCase, all_cases
from scripts.aot.dumps import find_kernels
from scripts.aot.results import Result


def run(case: KernelCase | StepCase, folder: Path) -> Result:
    """Compile a case and look at its kernels."""
    step = None
    try:
        if isinstance(case, StepCase):
            from scripts.aot.compile_step import compile_step

            compiled, step = compile_step(case)
        else:
            from scripts.aot.compile_kernel import compile_kernel

            compiled = compile_kernel(case)
    except NotImplementedError as error:
        return Result(case, "refused", detail=str(error))
    return Result(
        case,
        "compiled",
        lower_seconds=compiled.lower_seconds,
        compile_seconds=compiled.compile_seconds,
        kernels=find_kernels(folder, compiled.executable.as_text(), TARGETS[case.target].arch),
        step=step,
    )


if __name__ == "__main__":
    name, folder, result = sys.argv[1:]
    [wanted] = [case for case in all_cases() if case.name == name]
    Path(result).write_text(json.dumps(run(wanted, Path(folder)).as_json()))
