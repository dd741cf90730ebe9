"""The engine end to end on a random model: do the kernels give the tokens that our XLA attention gives?"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from scripts.gpu.jobs import Case, CheckFailedError
from scripts.gpu.workplace import Workplace

# By dtype: (closer than this, rounding alone may swap the two best tokens; largest difference of logprobs and margins).
_TOLERANCE = {"float32": (1e-4, 1e-3), "bfloat16": (0.2, 0.25)}


@dataclass(frozen=True)
class Step:
    """A generated token, its logprob, and how far the best logit was ahead of the second."""

    token: int
    logprob: float
    margin: float


def compare_engines(case: Case, place: Workplace) -> dict[str, Any]:
    """Greedy requests that arrive over several steps, so that chunks and decode rows mix, with either attention."""
    import jax.numpy as jnp

    from scripts.gpu.random_model import draw_weights, model_config, resolved_config
    from scripts.gpu.serving import attention_backend, start_engine

    model = model_config(case["model"])
    config = resolved_config(
        model,
        dtype=case["dtype"],
        max_model_len=case["max_model_len"],
        max_num_seqs=case["max_num_seqs"],
        max_num_batched_tokens=case["token_sizes"][-1],
        block_size=case["block_size"],
    )
    backend = attention_backend(place.backend_name(case["backend"]), model, config)
    params = draw_weights(model, case["dtype"])
    for layer in params["layers"].values():
        # Attention outweighs the token itself, so that every position of the context matters.
        layer["self_attn"]["o_proj"]["kernel"] *= jnp.asarray(3, case["dtype"])
    answers = []
    for chosen in (backend, attention_backend("xla", model, config)):
        engine = start_engine(
            model,
            config,
            _copied(params),
            chosen,
            token_sizes=case["token_sizes"],
            num_blocks=config.max_num_seqs * config.max_blocks_per_seq,
        )
        answers.append(_generate(engine, case))
        engine.close()
    ours, theirs = answers
    near_tie, tolerance = _TOLERANCE[case["dtype"]]
    results = {name: compare(ours[name], theirs[name], near_tie, tolerance) for name in theirs}
    return {
        "requests": len(results),
        "tokens": sum(len(steps) for steps in theirs.values()),
        "tokens_compared": sum(compared for compared, _ in results.values()),
        "ended_at_near_tie": sum(compared < len(theirs[name]) for name, (compared, _) in results.items()),
        "largest_difference": max(difference for _, difference in results.values()),
    }


def compare(
    ours: Sequence[Step], theirs: Sequence[Step], near_tie: float, tolerance: float
) -> tuple[int, float]:
    """Token by token, up to the first near-tie that fell the other way: after it the contexts differ.

    Returns:
      (tokens compared, largest difference of their logprobs and margins)

    Raises:
      CheckFailedError: another token where theirs was well ahead, or numbers too far apart.
    """
    if len(ours) != len(theirs):
        raise CheckFailedError(f"{len(ours)} tokens and {len(theirs)}")
    largest = 0.0
    for at, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.token != b.token:
            if not b.margin < near_tie:
                raise CheckFailedError(
                    f"token {at} is {a.token}, not {b.token}, which was ahead by {b.margin:.1e}"
                )
            return at, largest
        apart = max(abs(a.logprob - b.logprob), abs(a.margin - b.margin))
        if not apart <= tolerance:
            raise CheckFailedError(
                f"token {at}: logprob or margin differ by {apart:.1e}, allowed {tolerance:.0e}"
            )
        largest = max(largest, apart)
    return len(ours), largest


def _generate(engine: Any, case: Case) -> dict[str, list[Step]]:
    """A request every second step; every answer by its request's id."""
    from jaxserve.request import GenerationRequest, SamplingParams

    rng = random.Random(0)
    vocab = case["model"]["vocab_size"]
    waiting = [
        GenerationRequest(
            f"r{i}",
            tuple(rng.randrange(vocab) for _ in range(length)),
            SamplingParams(max_tokens=case["max_tokens"], temperature=0.0, logprobs=2),
        )
        for i, length in enumerate(case["prompt_lens"])
    ]
    answers: dict[str, list[Step]] = {request.request_id: [] for request in waiting}
    step = 0
    while waiting or engine.has_work():
        if waiting and step % 2 == 0:
            engine.submit(waiting.pop(0))
        for output in engine.step():
            if output.error:
                raise CheckFailedError(f"{output.request_id}: {output.error}")
            for entry in output.logprobs or ():
                margin = entry.top[0][1] - entry.top[1][1]
                answers[output.request_id].append(Step(entry.token_id, entry.logprob, margin))
        step += 1
    if engine.stats.serving_compilations:
        raise CheckFailedError(f"serving compiled {engine.stats.serving_compilations} programs")
    return answers


def _copied(params: dict[str, Any]) -> dict[str, Any]:
    """Closing an engine frees its parameters, and two engines are made of one set."""
    import jax

    return jax.tree.map(lambda x: x.copy(), params)
