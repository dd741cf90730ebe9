"""A candidate's case: is it right, and how long does it take?"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from pallas_kernels.paged_attention import Backend
from pallas_kernels.paged_attention.cases import backend_for, expected, run, spec_of
from pallas_kernels.paged_attention.tuning import TuningConfig, shape_class
from scripts.gpu.attention_load import run_decode, run_prefill
from scripts.gpu.attention_speed import prepare
from scripts.gpu.correctness import build_problem, check_outputs, this_device
from scripts.gpu.jobs import Case, CheckFailedError
from scripts.gpu.measure import median_seconds
from scripts.gpu.workplace import Workplace


def check_and_time(case: Case, place: Workplace) -> dict[str, Any]:
    """Seconds at each of the case's `loads`, and their geometric mean as the `score`.

    Also says which row of the table this is about: `shape`, and `base`, the row that holds without tuning.

    Raises:
      CheckFailedError: the candidate gives wrong numbers.
      NotImplementedError: the backend does not run such calls here.
    """
    problem = build_problem(case["check"])
    found = backend_for(place.backend_name(case["backend"]), problem, this_device())
    assert found.tuning is not None
    facts = {
        "shape": dataclasses.asdict(shape_class(spec_of(problem), this_device())),
        "base": dataclasses.asdict(found.tuning),
    }
    if case["config"] is None:  # only asked which row it is
        return facts
    config = TuningConfig(**case["config"])
    backend = dataclasses.replace(found, tuning=config)
    outputs = [run(problem, backend) for _ in range(1 if place.cpu else 3)]
    if not np.isfinite(outputs[0]).all():
        raise CheckFailedError("NaN or infinity in the output")
    real = problem.cu_q_lens[problem.num_seqs]
    error = check_outputs([out[:real] for out in outputs], expected(problem)[:real], problem.dtype)
    seconds = [_time(load, place, config) for load in case["loads"]]
    return {**facts, "error": error, "seconds": seconds, "score": math.exp(np.mean(np.log(seconds)))}


def _time(load_case: Case, place: Workplace, config: TuningConfig) -> float:
    found, pool, load = prepare(load_case, place, launches=load_case["launches"])
    backend: Backend = dataclasses.replace(found, tuning=config)
    launch = run_prefill if "chunk" in load_case else run_decode
    taken = median_seconds(
        lambda: launch(load, pool, backend), jax.block_until_ready, launches=len(load.tables_LSB)
    )
    return taken["seconds"]
