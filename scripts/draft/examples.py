"""What an exit learns from: hidden states of the model's own texts behind its first layers, and behind its last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.config import ModelConfig
from jaxserve.device.params import fill_params
from jaxserve.device.step_parts import split_model

_SEQUENCES = 8  # texts at a time
_LENGTH = 512  # a longer text ends there
_LENGTHS = 32  # texts are padded to a multiple of this


@dataclass(frozen=True)
class Examples:
    """N tokens of several texts, one text behind the other.

    Attributes:
      early_ND: float32, behind the first layers. final_ND: float32, behind all of them, normed.
      token_ids_N: the token that follows.
      positions_N: in its text.
      texts_N: the text's number.
      is_answer_N: the token that follows is one that the model has said.
      head_VD: the model's output head.
    """

    early_ND: np.ndarray
    final_ND: np.ndarray
    token_ids_N: np.ndarray
    positions_N: np.ndarray
    texts_N: np.ndarray
    is_answer_N: np.ndarray
    head_VD: np.ndarray


def make_examples(
    model: ModelConfig,
    params: dict[Any, Any],
    sequences: Sequence[tuple[list[int], list[int]]],
    *,
    num_layers: int,
) -> Examples:
    """Run every (prompt, answer) through the model once.

    Args:
      params: float32, keyed like `WeightSpec.path`; emptied.
      num_layers: how many layers stand before the exit.
    """
    head = params["embed_tokens"]["embedding"] if model.tie_word_embeddings else params["lm_head"]["kernel"]
    head_VD = np.asarray(head)
    cut, abstract = split_model(model, dtype=jnp.float32)
    filled = fill_params(abstract, params)
    ends = nnx.merge(cut.ends, filled.ends)
    layer = jax.jit(_layer, static_argnums=0)
    columns: list[list[np.ndarray]] = [[] for _ in range(6)]
    texts = [[*prompt, *answer][: _LENGTH + 1] for prompt, answer in sequences]
    by_length = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    for start in range(0, len(texts), _SEQUENCES):
        numbers = by_length[start : start + _SEQUENCES]
        length = -(-(len(texts[numbers[-1]]) - 1) // _LENGTHS) * _LENGTHS
        ids = np.zeros((_SEQUENCES, length), np.int32)
        for row, number in zip(ids, numbers, strict=False):
            row[: len(texts[number]) - 1] = texts[number][:-1]
        x_TD, shared = ends.embed(jnp.asarray(ids.ravel()), jnp.tile(jnp.arange(length), _SEQUENCES))
        early = x_TD
        for index, (graphdef, state) in enumerate(zip(cut.layers, filled.layers, strict=True)):
            x_TD = layer(graphdef, state, x_TD, shared)
            if index + 1 == num_layers:
                early = x_TD
        early_, final_ = (np.asarray(x).reshape(_SEQUENCES, length, -1) for x in (early, ends.norm(x_TD)))
        for row, number in enumerate(numbers):
            count = len(texts[number]) - 1
            at = np.arange(count)
            of_text = (early_[row, :count], final_[row, :count], np.array(texts[number][1:]), at)
            is_answer = at >= len(sequences[number][0]) - 1
            for column, new in zip(columns, (*of_text, np.full(count, number), is_answer), strict=True):
                column.append(new)
    return Examples(*(np.concatenate(column) for column in columns), head_VD)


def _layer(graphdef: nnx.GraphDef, state: nnx.State, x_TD: jax.Array, shared: Any) -> jax.Array:
    x_TD, _ = nnx.merge(graphdef, state)(x_TD, shared, 0, None, _attend)
    return x_TD


def _attend(
    index: int, q_THd: jax.Array, k_TKd: jax.Array, v_TKd: jax.Array, cache: None
) -> tuple[jax.Array, None]:
    """Causal attention inside of each text."""
    length = len(q_THd) // _SEQUENCES
    split = partial(jnp.reshape, shape=(_SEQUENCES, length, k_TKd.shape[1], -1, q_THd.shape[2]))
    q, k, v = split(q_THd), split(k_TKd)[..., 0, :], split(v_TKd)[..., 0, :]
    scores = jnp.einsum("nqkgd,nskd->nkgqs", q, k) * q_THd.shape[2] ** -0.5
    causal = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -jnp.inf), axis=-1)
    return jnp.einsum("nkgqs,nskd->nqkgd", weights, v).reshape(q_THd.shape), None
