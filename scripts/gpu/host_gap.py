"""How long the device waits for the host: the whole engine around a model of realistic size."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

from jaxserve.config import ModelConfig, ResolvedConfig
from pallas_kernels.paged_attention import Backend
from scripts.gpu.jobs import Case, CheckFailedError
from scripts.gpu.workplace import Workplace


def measure(case: Case, place: Workplace) -> dict[str, Any]:
    """`batch` requests of one prompt token decode `max_tokens` tokens each, without overlap and with it.

    Contexts are short, so steps are as quick as they get and the host's share is at its largest. The gap is that of
    `EngineStats.host_gap_seconds`; the host's part is all of a step but the waiting for the device.
    """
    from scripts.gpu.random_model import draw_weights, model_config, resolved_config
    from scripts.gpu.serving import attention_backend

    place.keep("step", None, lambda: None)  # frees an earlier case's arrays
    model = model_config(case["model"])
    config = resolved_config(
        model,
        dtype=case["dtype"],
        max_model_len=case["max_model_len"],
        max_num_seqs=case["batch"],
        max_num_batched_tokens=case["batch"],
        block_size=case["block_size"],
    )
    backend = attention_backend(place.backend_name(case["backend"]), model, config)
    params = draw_weights(model, case["dtype"])
    waiting = _decode(case, model, config, params, backend)
    # The first engine's end has freed the weights.
    params = draw_weights(model, case["dtype"])
    overlapped = _decode(case, model, dataclasses.replace(config, overlap=True), params, backend)
    return {
        "ran_on": backend.name,
        **waiting,
        **{f"overlap_{name}": value for name, value in overlapped.items()},
        "recompilations": waiting["recompilations"] + overlapped["recompilations"],
    }


def _decode(
    case: Case, model: ModelConfig, config: ResolvedConfig, params: dict[Any, Any], backend: Backend
) -> dict[str, Any]:
    from jaxserve.request import GenerationRequest, SamplingParams
    from scripts.gpu.serving import start_engine

    batch, tokens = case["batch"], case["max_tokens"]
    blocks = batch * -(-(tokens + 1) // case["block_size"])
    engine = start_engine(model, config, params, backend, token_sizes=[batch], num_blocks=blocks)
    for i in range(batch):
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        engine.submit(GenerationRequest(f"r{i}", (i % model.vocab_size,), sampling))
    taken, host, gaps = [], [], []
    while engine.has_work():
        stats = engine.stats
        host_before, gap_before, started = stats.host_seconds, stats.host_gap_seconds, time.perf_counter()
        for output in engine.step():
            if output.error:
                raise CheckFailedError(f"{output.request_id}: {output.error}")
        taken.append(time.perf_counter() - started)
        host.append(stats.host_seconds - host_before)
        gaps.append(stats.host_gap_seconds - gap_before)
    recompiled = engine.stats.serving_compilations
    engine.close()
    return {
        "step_seconds": statistics.median(taken),
        "host_seconds": statistics.median(host),
        "host_gap_seconds": statistics.median(gaps),
        "steps": len(taken),
        "recompilations": recompiled,
    }
