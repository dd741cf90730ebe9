"""How much of a step the host takes: the whole engine around a model of realistic size."""

from __future__ import annotations

import statistics
import time
from typing import Any

from scripts.gpu.jobs import Case, CheckFailedError
from scripts.gpu.workplace import Workplace


def measure(case: Case, place: Workplace) -> dict[str, Any]:
    """`batch` requests of one prompt token decode `max_tokens` tokens each.

    Contexts are short, so steps are as quick as they get and the host's share is at its largest. The host's part is
    all of a step that is not the runner's (which waits for the device).
    """
    from jaxserve.request import GenerationRequest, SamplingParams
    from scripts.gpu.random_model import draw_weights, model_config, resolved_config
    from scripts.gpu.serving import attention_backend, start_engine

    place.keep("step", None, lambda: None)  # frees an earlier case's arrays
    model = model_config(case["model"])
    batch, tokens = case["batch"], case["max_tokens"]
    config = resolved_config(
        model,
        dtype=case["dtype"],
        max_model_len=case["max_model_len"],
        max_num_seqs=batch,
        max_num_batched_tokens=batch,
        block_size=case["block_size"],
    )
    backend = attention_backend(place.backend_name(case["backend"]), model, config)
    params = draw_weights(model, case["dtype"])
    blocks = batch * -(-(tokens + 1) // case["block_size"])
    engine = start_engine(model, config, params, backend, token_sizes=[batch], num_blocks=blocks)
    for i in range(batch):
        sampling = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        engine.submit(GenerationRequest(f"r{i}", (i % model.vocab_size,), sampling))
    taken, host = [], []
    while engine.has_work():
        before, started = engine.stats.host_seconds, time.perf_counter()
        for output in engine.step():
            if output.error:
                raise CheckFailedError(f"{output.request_id}: {output.error}")
        taken.append(time.perf_counter() - started)
        host.append(engine.stats.host_seconds - before)
    recompiled = engine.stats.serving_compilations
    engine.close()
    return {
        "ran_on": backend.name,
        "step_seconds": statistics.median(taken),
        "host_seconds": statistics.median(host),
        "host_share": statistics.median(host) / statistics.median(taken),
        "steps": len(taken),
        "recompilations": recompiled,
    }
