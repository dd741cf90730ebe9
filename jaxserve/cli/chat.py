"""`jaxserve chat`: a conversation in the terminal, with a model in this process or with a running server."""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from jaxserve.cli import engine_options as options
from jaxserve.cli.chat_session import COMMANDS, Answerer, ChatSession, ChatSettings, Conversation, Message
from jaxserve.config import EngineConfig, GenerationDefaults
from jaxserve.errors import JaxserveError
from jaxserve.request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from jaxserve.llm import LLM

_DEFAULT_MODEL = "smollm2"


def chat(
    model: Annotated[
        str | None,
        typer.Option(
            help="A name from `jaxserve pull --list`, a Hugging Face directory, a .gguf file or a converted "
            f"checkpoint [default: {_DEFAULT_MODEL}]. With --url: one of the server's models.",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to the server at this address instead of loading a model.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="With --url: the key that the server asks for.")] = None,
    system: Annotated[str | None, typer.Option(help="System prompt to begin with.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 always takes the likeliest token [default: the model's own].")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Sample among the likeliest tokens that make up this share of the mass."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, in tokens.")] = 512,
    seed: Annotated[int | None, typer.Option(help="Makes answers repeatable.")] = None,
    dtype: options.DType = options.DTypeChoice.auto,
    quantization: options.Quantization = options.QuantizationChoice.none,
    max_model_len: options.MaxModelLen = None,
) -> None:
    """Talk to a model in the terminal.

    Answers appear token by token. Ctrl-C stops an answer; /exit or Ctrl-D leaves; /system TEXT sets the system
    prompt; /reset forgets the conversation. From a pipe, every line is one message.

    \b
    Examples:
      jaxserve chat
      jaxserve chat --model ./TinyLlama-1.1B-Chat --temperature 0
      jaxserve chat --url http://127.0.0.1:8000
      echo "Why is the sky blue?" | jaxserve chat
    """
    settings = ChatSettings(max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed)
    settings.check()
    _tolerate_bad_utf8()
    interactive = sys.stdin.isatty()
    # One conversation at a time needs few shapes, so all are compiled soon.
    config = EngineConfig(
        dtype=dtype.value,
        quantization=options.quantization_of(quantization),
        max_model_len=max_model_len,
        max_num_seqs=1,
        max_num_batched_tokens=128,
    )
    with _open_answerer(model, url, api_key, config) as answerer:
        session = ChatSession(
            answerer=answerer,
            settings=settings,
            conversation=Conversation(system=system),
            write=_writer(sys.stdout),
            notice=lambda text: print(text, file=sys.stderr, flush=True),
            interactive=interactive,
        )
        session.run(_typed_lines() if interactive else sys.stdin)


@dataclass(frozen=True, slots=True)
class LocalAnswerer:
    """Answers with a model in this process."""

    llm: LLM

    def stream(self, messages: list[Message], settings: ChatSettings) -> Generator[str]:
        engine = self.llm.engine
        prompt = engine.tokenizer.encode_chat(messages)
        params = SamplingParams(**{**_model_defaults(engine.generation), **settings.as_fields()})
        with closing(self.llm.stream(prompt, params)) as outputs:
            for output in outputs:
                if output.finish_reason is FinishReason.ERROR:
                    raise JaxserveError(output.error or "the engine failed")
                yield output.text


def _model_defaults(generation: GenerationDefaults) -> dict[str, Any]:
    names = ("temperature", "top_p", "top_k", "repetition_penalty")
    values = {name: getattr(generation, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


@contextmanager
def _open_answerer(
    model: str | None, url: str | None, api_key: str | None, config: EngineConfig
) -> Iterator[Answerer]:
    if url is not None:
        from jaxserve.cli.chat_client import ServerAnswerer

        yield ServerAnswerer.connect(url, model=model, api_key=api_key)
        return
    from jaxserve.llm import LLM

    with LLM(model or _DEFAULT_MODEL, config=config, wait_for_programs=False) as llm:
        yield LocalAnswerer(llm)


def _typed_lines() -> Iterator[str]:
    """What a person types at the prompt, with line editing where the platform has it."""
    with suppress(ImportError):
        import readline  # noqa: F401  importing it is what gives input() its editing keys
    print(COMMANDS, file=sys.stderr)
    while True:
        try:
            yield input("> ")
        except KeyboardInterrupt:
            print("\n(/exit or Ctrl-D leaves)", file=sys.stderr)
        except EOFError:
            print(file=sys.stderr)
            return


def _writer(stream: TextIO) -> Callable[[str], None]:
    steer_terminal = stream.isatty()

    def write(text: str) -> None:
        stream.write(printable(text) if steer_terminal else text)
        stream.flush()

    return write


def printable(text: str) -> str:
    """`text` without the control characters that steer a terminal, which a model's answer is not trusted with."""
    return "".join(
        char if char in "\n\t" or char.isprintable() or ord(char) > 0x9F else "\N{REPLACEMENT CHARACTER}"
        for char in text
    )


def _tolerate_bad_utf8() -> None:
    """Bytes on stdin that are no UTF-8 become U+FFFD, and what stdout can't spell a "?"; neither ends the session."""
    for stream, encoding in ((sys.stdin, "utf-8"), (sys.stdout, None)):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(encoding=encoding, errors="replace")
