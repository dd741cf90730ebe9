"""The `jaxserve` command: gathers the subcommands, and turns errors into one line and an exit code.

Importing this must stay quick: no subcommand's module imports jax, transformers or aiohttp before it runs.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import jaxserve
from jaxserve.cli.batch import batch
from jaxserve.cli.bench import build_bench
from jaxserve.cli.chat import chat
from jaxserve.cli.compile import compile_command
from jaxserve.cli.convert import convert
from jaxserve.cli.finite_numbers import finite_numbers
from jaxserve.cli.plan_buckets import plan_buckets
from jaxserve.cli.pull import pull
from jaxserve.cli.replay import replay
from jaxserve.cli.serve import serve
from jaxserve.cli.simulate import simulate
from jaxserve.cli.top import top
from jaxserve.cli.trace import trace
from jaxserve.errors import JaxserveError

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130  # what a shell reports for a command that Ctrl-C ended

# Typer brings its own copy of click in some releases and needs the real one in others; this is either's base class
# for mistakes on the command line.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

_HELP = """Serve language models with JAX.

\b
First steps:
  jaxserve pull smollm2                  get a small demo model
  jaxserve chat                          talk to it in the terminal
  jaxserve serve --model smollm2         OpenAI-compatible server, port 8000
  jaxserve batch --help                  answer a file of requests

A model is a name that `jaxserve pull --list` shows, a Hugging Face directory, a .gguf file, or a folder that
`jaxserve convert` wrote. `jaxserve COMMAND --help` explains a command.
"""


def _show_version(value: bool) -> None:
    if value:
        typer.echo(f"jaxserve {jaxserve.__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(EXIT_BAD_INPUT)


def build_app(only: str | None = None) -> typer.Typer:
    """The command tree.

    Args:
      only: leave out the other commands, if it names one: reading everybody's options takes a tenth of a second.
    """
    app = typer.Typer(
        name="jaxserve",
        help=_HELP,
        callback=_root,
        invoke_without_command=True,
        add_completion=False,
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    )
    commands: dict[str, Callable[..., object]] = {
        "serve": serve,
        "chat": chat,
        "batch": batch,
        "pull": pull,
        "convert": convert,
        "plan-buckets": plan_buckets,
        "trace": trace,
        "simulate": simulate,
        "replay": replay,
        "top": top,
        "compile": compile_command,
    }
    for name, command in commands.items():
        if only not in commands or name == only:
            app.command(name)(finite_numbers(command))
    if only not in commands:
        app.add_typer(build_bench())
    return app


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code.

    Errors that a person can mend are one line on stderr and code 2; JAXSERVE_DEBUG=1 shows their traceback.
    Anything else is a bug and keeps its traceback.
    """
    try:
        app = build_app(arguments[0] if arguments else None)
        result = app(args=list(arguments), prog_name="jaxserve", standalone_mode=False)
    except _UsageError as error:
        return _usage_error(error)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`jaxserve ... | head`). Python would complain again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except JaxserveError as error:
        return _report(str(error))
    except OSError as error:
        if error.filename is None:
            raise
        return _report(f"{error.filename}: {error.strerror}")
    return result if isinstance(result, int) else 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run(sys.argv[1:]))


def _usage_error(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "jaxserve"
    message = error.format_message().rstrip(".")  # type: ignore[attr-defined]
    return _report(f"{message} (see `{command} --help`)")


def _report(message: str) -> int:
    if os.environ.get("JAXSERVE_DEBUG") == "1":
        traceback.print_exc()
    typer.echo("error: " + " ".join(message.split()), err=True)
    return EXIT_BAD_INPUT
