"""Training an exit: a ridge regression onto final hidden states to begin with, then Adam on the model's distribution.

An exit goes on from its own guesses (`device.draft`), so in half of the examples the hidden state before is its guess.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.exit import Exit, ExitShape
from scripts.draft.examples import Examples

_RIDGE = 0.01  # times the number of examples; inputs have variance 1
_WARM_UP = 30  # steps until the full learning rate


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long, and how fast."""

    epochs: int = 4
    batch_size: int = 256
    learning_rate: float = 1e-3


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often an exit finds the token that the model finds best, in held-out answers.

    Attributes:
      coverage: share of these tokens that the exit knows: the most it could reach.
      first: of the token behind a known one.
      second: of the token behind that, from its own guess of the first's hidden state.
      whole: as `first`, with the model's own head of all tokens.
    """

    coverage: float
    first: float
    second: float
    whole: float


def frequent_tokens(token_ids: np.ndarray, vocab_size: int, count: int) -> np.ndarray:
    """The `count` most frequent ids, ascending; of equally frequent ones (never seen, say) the smaller, which a
    vocabulary made by merging pairs has learned earlier."""
    frequency = np.bincount(token_ids, minlength=vocab_size)
    return np.sort(np.argsort(-frequency, kind="stable")[:count]).astype(np.int32)


def train_exit(
    examples: Examples,
    shape: ExitShape,
    schedule: Schedule,
    *,
    held_out: np.ndarray,
    seed: int = 0,
    announce: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Any], Agreement]:
    """(parameters as `exit_specs` names them, agreement in the answers among held-out texts)

    Args:
      held_out: bool [N], examples of texts that are not trained on.
    """
    rng = np.random.default_rng(seed)
    answers = examples.token_ids_N[examples.is_answer_N & ~held_out]
    token_ids = frequent_tokens(answers, len(examples.head_VD), shape.num_tokens)
    # A guess needs the final hidden state before it, and a guess of that one the state before that.
    trained = np.flatnonzero(~held_out & (examples.positions_N >= 2))
    params = _begin(examples, shape, trained, token_ids, rng)
    graphdef = nnx.graphdef(nnx.eval_shape(lambda: Exit(shape, dtype=jnp.float32, rngs=nnx.Rngs(0))))
    exit_of = lambda params: _merge(graphdef, {**params, "token_ids": jnp.asarray(token_ids)})  # noqa: E731
    head_ED = jnp.asarray(examples.head_VD[token_ids])

    def loss(params: Any, rows: dict[str, jax.Array]) -> jax.Array:
        above = exit_of(params)
        half = len(rows["final"]) // 2
        guessed = above.guess(rows["early_before"][:half], rows["before_before"][:half])
        before = jnp.concatenate([jax.lax.stop_gradient(guessed), rows["before"][half:]])
        said = jax.nn.log_softmax(above.compute_logits(above.guess(rows["early"], before)))
        wanted = jax.nn.softmax(rows["final"] @ head_ED.T)
        return -(wanted * said).sum(-1).mean()

    num_steps = schedule.epochs * (len(trained) // schedule.batch_size)

    @jax.jit
    def step(params: Any, moments: Any, count: jax.Array, rows: dict[str, jax.Array]) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, rows)
        rate = schedule.learning_rate * jnp.minimum(1.0, (count + 1) / _WARM_UP)
        rate *= 0.5 * (1 + jnp.cos(jnp.pi * count / num_steps))
        params, moments = _adam(params, moments, gradient, count, rate)
        return params, moments, value

    moments = tuple(jax.tree.map(jnp.zeros_like, params) for _ in range(2))
    agreement = measure(examples, exit_of(params), held_out)
    announce(f"regression alone: {agreement}")
    count, started = 0, time.perf_counter()
    for epoch in range(schedule.epochs):
        order, losses = rng.permutation(trained), []
        for start in range(0, len(order) - schedule.batch_size + 1, schedule.batch_size):
            at = order[start : start + schedule.batch_size]
            params, moments, value = step(params, moments, jnp.int32(count), _rows(examples, at))
            losses.append(float(value))
            count += 1
        agreement = measure(examples, exit_of(params), held_out)
        seconds = time.perf_counter() - started
        announce(f"epoch {epoch + 1}: loss {np.mean(losses):.3f}, {agreement}, {seconds:.0f} s")
    return {**params, "token_ids": jnp.asarray(token_ids)}, agreement


def measure(examples: Examples, above: Exit, held_out: np.ndarray, most: int = 1500) -> Agreement:
    """See `Agreement`; of `most` tokens, evenly spaced."""
    follows = np.flatnonzero(held_out & examples.is_answer_N & (examples.positions_N >= 2))
    at = follows[:: max(1, len(follows) // most)]
    rows = _rows(examples, at)
    best_of = lambda hidden: np.argmax(np.asarray(hidden) @ examples.head_VD.T, -1)  # noqa: E731
    best, token_ids = best_of(rows["final"]), np.asarray(above.token_ids[...])
    guess = above.guess(rows["early"], rows["before"])
    guessed_before = above.guess(rows["early_before"], rows["before_before"])
    second = above.guess(rows["early"], guessed_before)
    known_best = lambda guess: token_ids[np.argmax(np.asarray(above.compute_logits(guess)), -1)]  # noqa: E731
    return Agreement(
        coverage=float(np.isin(best, token_ids).mean()),
        first=float((known_best(guess) == best).mean()),
        second=float((known_best(second) == best).mean()),
        whole=float((best_of(guess) == best).mean()),
    )


def _rows(examples: Examples, at: np.ndarray) -> dict[str, jax.Array]:
    early, final = examples.early_ND, examples.final_ND
    picked = {
        "early": early[at],
        "before": final[at - 1],
        "early_before": early[at - 1],
        "before_before": final[at - 2],
        "final": final[at],
    }
    return {name: jnp.asarray(values) for name, values in picked.items()}


def _begin(
    examples: Examples, shape: ExitShape, at: np.ndarray, token_ids: np.ndarray, rng: np.random.Generator
) -> dict[str, Any]:
    """Scales and the linear map by regression; an MLP that gives 0; the model's own rows as the head."""
    inputs = (examples.early_ND[at], examples.final_ND[at - 1])
    normed = [x / np.sqrt(np.square(x).mean(-1, keepdims=True) + shape.rms_norm_eps) for x in inputs]
    scales = [1 / (x.std(0) + 1e-6) for x in normed]
    x = np.concatenate([each * scale for each, scale in zip(normed, scales, strict=True)], axis=1)
    x_mean, y_mean = x.mean(0), examples.final_ND[at].mean(0)
    x -= x_mean
    ridge = _RIDGE * len(x) * np.eye(x.shape[1], dtype=np.float32)
    map_IO = np.linalg.solve(x.T @ x + ridge, x.T @ (examples.final_ND[at] - y_mean))
    width, inner = shape.hidden_size, shape.inner_size

    def random_linear() -> dict[str, Any]:
        kernel = (rng.standard_normal((inner, 2 * width)) * (2 * width) ** -0.5).astype(np.float32)
        return {"kernel": kernel, "bias": -kernel @ x_mean}

    params = {
        "norm_early": {"scale": scales[0]},
        "norm_before": {"scale": scales[1]},
        "skip": {"kernel": map_IO.T, "bias": y_mean - x_mean @ map_IO},
        "mlp": {
            "gate_proj": random_linear(),
            "up_proj": random_linear(),
            "down_proj": {"kernel": np.zeros((width, inner)), "bias": np.zeros(width)},
        },
        "head": {"kernel": examples.head_VD[token_ids]},
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


def _merge(graphdef: nnx.GraphDef, params: dict[str, Any]) -> Exit:
    merged: Exit = nnx.merge(graphdef, nnx.State(jax.tree.map(nnx.Param, params)))
    return merged


def _adam(params: Any, moments: Any, gradient: Any, count: jax.Array, rate: jax.Array) -> tuple[Any, Any]:
    """One step (arXiv 1412.6980) with its usual constants."""
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradient)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * jnp.square(g), moments[1], gradient)
    times = count + 1.0
    corrections = 1 - 0.9**times, 1 - 0.999**times

    def move(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p - rate * (m / corrections[0]) / (jnp.sqrt(v / corrections[1]) + 1e-8)

    return jax.tree.map(move, params, first, second), (first, second)
