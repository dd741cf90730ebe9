"""`scripts/train_draft`: its arguments, and carrying it out."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict
from pathlib import Path

_DESCRIPTION = (
    "Train an exit for a model's own first layers on what the model says, in minutes on a CPU, and store it. Serve "
    "with --speculative exit:OUTPUT. Exit codes: 0; 2 for bad input."
)
_HELD_OUT = 8  # every so many-th text


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/train_draft", description=_DESCRIPTION)
    parser.add_argument("--model", default="smollm2", help="name, directory or file [default: smollm2]")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="where the exit goes")
    parser.add_argument("--layers", type=int, default=2, help="layers before the exit [default: 2]")
    parser.add_argument("--inner-size", type=int, default=1024, help="of its MLP [default: 1024]")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens that it knows [default: 4096]")
    parser.add_argument("--prompts", type=int, default=480, help="questions to the model [default: 480]")
    parser.add_argument("--answer-tokens", type=int, default=96, help="at most in an answer [default: 96]")
    parser.add_argument("--epochs", type=int, default=4, help="[default: 4]")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and training [default: 1]")
    parser.add_argument(
        "--outputs", type=Path, metavar="FILE", help="keep the answers there, and use those that are there"
    )
    arguments = parser.parse_args()
    from jaxserve.errors import JaxserveError

    try:
        _train(arguments)
    except JaxserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _train(arguments: argparse.Namespace) -> None:
    # Imported here so that `--help` needs no jax.
    import jax.numpy as jnp
    import numpy as np

    from jaxserve.checkpoint import open_checkpoint, resolve_model
    from jaxserve.checkpoint.exit_store import write_exit
    from jaxserve.errors import ConfigError
    from jaxserve.model_store import default_store
    from jaxserve.models.exit import ExitShape
    from jaxserve.progress import NullProgress
    from scripts.draft import outputs
    from scripts.draft.examples import make_examples
    from scripts.draft.prompts import prompts
    from scripts.draft.train import Schedule, train_exit

    started = time.perf_counter()
    checkpoint = open_checkpoint(
        resolve_model(arguments.model, store=default_store(), progress=NullProgress())
    )
    model = checkpoint.config
    if not 1 <= arguments.layers <= model.num_layers:
        raise ConfigError(f"--layers must be between 1 and {model.num_layers}, got {arguments.layers}")
    if not 1 <= arguments.tokens <= model.vocab_size:
        raise ConfigError(f"--tokens must be between 1 and {model.vocab_size}, got {arguments.tokens}")
    if arguments.outputs is not None and arguments.outputs.exists():
        sequences = outputs.read(arguments.outputs)
    else:
        asked = prompts(arguments.seed, arguments.prompts)
        sequences = outputs.generate(arguments.model, asked, max_tokens=arguments.answer_tokens)
        if arguments.outputs is not None:
            outputs.write(arguments.outputs, sequences)
    _say(started, f"{sum(len(answer) for _, answer in sequences)} tokens in {len(sequences)} answers")
    examples = make_examples(
        model, checkpoint.load_params(jnp.float32), sequences, num_layers=arguments.layers
    )
    _say(started, f"hidden states of {len(examples.token_ids_N)} tokens")
    shape = ExitShape(model.hidden_size, arguments.inner_size, arguments.tokens, model.rms_norm_eps)
    held_out = np.asarray(examples.texts_N % _HELD_OUT == _HELD_OUT - 1)
    params, agreement = train_exit(
        examples,
        shape,
        Schedule(epochs=arguments.epochs),
        held_out=held_out,
        seed=arguments.seed,
        announce=lambda line: _say(started, line),
    )
    write_exit(
        arguments.output,
        name=checkpoint.name,
        model=model,
        tokenizer=checkpoint.tokenizer_parts,
        num_layers=arguments.layers,
        shape=shape,
        params=params,
        source={"texts": len(sequences), "tokens": int((~held_out).sum()), **asdict(agreement)},
    )
    _say(started, f"stored in {arguments.output}")


def _say(started: float, line: str) -> None:
    print(f"{time.perf_counter() - started:5.0f} s  {line}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
