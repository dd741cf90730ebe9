"""`jaxserve convert`: write any readable model as a checkpoint of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxserve.progress import BarProgress


def convert(
    source: Annotated[Path, typer.Argument(help="Hugging Face directory, .gguf file or checkpoint to read.")],
    destination: Annotated[
        Path, typer.Argument(help="Folder to write; an older checkpoint there is replaced.")
    ],
    dtype: Annotated[
        str | None,
        typer.Option(
            help="Store weights as float32, bfloat16 or float16 [default: as they are; quantised ones as "
            "float32].",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write a model as a checkpoint that loads fast.

    The result is complete or not there at all: nothing half written is left behind if it fails. Prints its folder.

    \b
    Examples:
      jaxserve convert ./TinyLlama-1.1B-Chat checkpoints/tinyllama
      jaxserve convert model.Q4_K_M.gguf checkpoints/model --dtype bfloat16
    """
    from jaxserve import checkpoint

    with BarProgress() as progress:
        typer.echo(checkpoint.convert(source, destination, dtype=dtype, progress=progress))
