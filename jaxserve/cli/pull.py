"""`jaxserve pull`: obtain a model by its name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jaxserve.model_store import default_store
from jaxserve.progress import BarProgress


def pull(
    name: Annotated[
        str | None, typer.Argument(help="One of the names that --list shows.", show_default=False)
    ] = None,
    list_models: Annotated[
        bool, typer.Option("--list", help="Show the known models and which are here.")
    ] = False,
    store: Annotated[
        Path | None,
        typer.Option(
            help="Folder to keep it in [default: $JAXSERVE_HOME, else checkpoints/ of the checkout, else your data "
            "folder].",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Fetch a known model and convert it.

    The result is a checkpoint that loads quickly. Does nothing when it is there already. Prints its folder.

    \b
    Examples:
      jaxserve pull --list
      jaxserve pull smollm2
      jaxserve pull smollm2 --store /data/models
    """
    from jaxserve import checkpoint

    folder = store or default_store()
    if list_models:
        for model in checkpoint.KNOWN_MODELS.values():
            state = f"in {folder / model.name}" if (folder / model.name).exists() else "not here yet"
            typer.echo(f"{model.name:12} {model.description} ({model.size / 1e6:.0f} MB to fetch; {state})")
        return
    if name is None:
        raise typer.BadParameter(f"give a name ({', '.join(checkpoint.KNOWN_MODELS)}) or --list")
    with BarProgress() as progress:
        path = checkpoint.pull(name, store=folder, progress=progress)
    typer.echo(path)
