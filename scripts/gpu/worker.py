"""A worker process: runs the cases of a file in turn, and writes down each start and end as it happens.

python -m scripts.gpu.worker CASES RESULTS
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from scripts.gpu.jobs import FAILED, LEFT_OUT, OK, REFUSED, WRONG, Case, CheckFailedError
from scripts.gpu.workplace import Workplace

EXIT_DEVICE_IN_DOUBT = 3
_OURS = ("scripts", "jaxserve", "pallas_kernels")
_KINDS = {
    "environment": "scripts.gpu.environment:describe",
    "attention": "scripts.gpu.correctness:attention",
    "decode": "scripts.gpu.correctness:decode",
    "large_cache": "scripts.gpu.attention_speed:compare_in_large_cache",
    "alone": "scripts.gpu.correctness:alone_and_in_company",
    "engine": "scripts.gpu.engine_tokens:compare_engines",
    "copy": "scripts.gpu.ceilings:copy_bandwidth",
    "matmul": "scripts.gpu.ceilings:matmul_rate",
    "time_decode": "scripts.gpu.attention_speed:time_decode",
    "time_prefill": "scripts.gpu.attention_speed:time_prefill",
    "jax_decode": "scripts.gpu.jax_sdpa:time_decode",
    "jax_prefill": "scripts.gpu.jax_sdpa:time_prefill",
    "torch_decode": "scripts.gpu.torch_sdpa:time_decode",
    "torch_prefill": "scripts.gpu.torch_sdpa:time_prefill",
    "step": "scripts.gpu.decode_step:time_step",
    "host_gap": "scripts.gpu.host_gap:measure",
    "tune": "scripts.gpu.tune_case:check_and_time",
    "selftest": "scripts.gpu.selftest:misbehave",
}


def run_case(case: Case, place: Workplace) -> dict[str, Any]:
    """Status, data and note of one case. Never raises for what a case does."""
    try:
        module, _, function = _KINDS[case["kind"]].partition(":")
        data = getattr(importlib.import_module(module), function)(case, place)
        return {"status": OK, "data": data}
    except NotImplementedError as error:
        return {"status": REFUSED, "note": _first_line(error)}
    except CheckFailedError as error:
        return {"status": WRONG, "note": _first_line(error)}
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OURS:
            return {"status": FAILED, "note": str(error)}
        return {"status": LEFT_OUT, "note": str(error)}
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        note = f"{type(error).__name__}: {str(error)[:600]} ({Path(where.filename).name}:{where.lineno})"
        # A device error leaves the context unusable, and whatever follows would fail for no fault of its own.
        too_large = "shared memory" in str(error).lower()  # was refused before it could do harm
        in_doubt = isinstance(error, RuntimeError | MemoryError) and not too_large
        return {"status": FAILED, "note": note, "in_doubt": in_doubt}


def main(cases_file: str, results_file: str) -> int:
    spec = json.loads(Path(cases_file).read_text())
    place = Workplace(cpu=spec["cpu"])
    with open(results_file, "a", buffering=1) as results:
        for case in spec["cases"]:
            results.write(json.dumps({"start": case["name"]}) + "\n")
            started = time.perf_counter()
            result = run_case(case, place)
            result |= {"end": case["name"], "seconds": round(time.perf_counter() - started, 2)}
            results.write(json.dumps(result) + "\n")
            if result.get("in_doubt"):
                return EXIT_DEVICE_IN_DOUBT
    return 0


def _first_line(error: Exception) -> str:
    return " ".join(str(error).split())[:600]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
