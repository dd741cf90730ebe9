"""Chat templates: Jinja in a sandbox with bounds, and client text that can't forge control tokens.

Templates see what Hugging Face's `apply_chat_template` gives them: `messages`, `tools`, `documents`,
`add_generation_prompt`, the names of special tokens, `raise_exception`, `strftime_now`, `tojson`, loop controls and the
`generation` tag.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes as nodes
import jinja2.sandbox

from jaxserve.errors import CheckpointError, InvalidRequestError

TIME_LIMIT_S = 5.0
FREE_OUTPUT_CHARS = 1 << 18  # room for a template's own text and defaults
OUTPUT_GROWTH = 4  # and this many characters for each one of the input
MAX_DEPTH = 64  # of nested lists and objects in a message
# A role becomes part of a control token in some templates, so only roles that templates know are let through.
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function", "ipython"})
_TICK = "_jaxserve_tick"
_CONCAT = "_jaxserve_concat"
_RESERVED = frozenset(
    {"messages", "tools", "add_generation_prompt", "raise_exception", "strftime_now", _TICK, _CONCAT}
)


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation. `marker` is a character that occurs in `text` only where client text spelled a special
    token: it stands inside that token's text and has to be removed after control tokens have been recognised."""

    text: str
    marker: str


class ChatTemplate:
    """A compiled template. Rendering is safe from several threads.

    Attributes:
      source: as it was given.
      knows_tools: it reads the variable `tools`.

    Raises:
      CheckpointError: the source is not valid Jinja.
    """

    def __init__(self, source: str, *, time_limit_s: float = TIME_LIMIT_S) -> None:
        self.source = source
        self._time_limit_s = time_limit_s
        environment = _Environment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            tree = environment.parse(source)
            self.knows_tools = "tools" in jinja2.meta.find_undeclared_variables(tree)
            _bound_loops(tree, environment)
            code = environment.compile(tree)
        except jinja2.TemplateSyntaxError as error:
            raise CheckpointError(f"chat template, line {error.lineno}: {error.message}") from error
        except RecursionError:
            raise CheckpointError("chat template: nested too deeply") from None
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        special_texts: Sequence[str] = (),
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedChat:
        """Render a conversation.

        Args:
          messages: see `Tokenizer.encode_chat`.
          special_texts: texts of control tokens, broken up by the marker wherever client text holds them.
          variables: the model's own variables (names of special tokens).
          add_generation_prompt, continue_final_message, tools, template_kwargs: see `Tokenizer.encode_chat`.

        Raises:
          InvalidRequestError: malformed messages, or the template refuses them or exceeds its bounds.
        """
        template_kwargs = template_kwargs or {}
        for name in template_kwargs:
            if name in _RESERVED:
                raise InvalidRequestError(
                    f"chat_template_kwargs must not set {name!r}", param="chat_template_kwargs"
                )
        checked = [_checked_message(message, index) for index, message in enumerate(_as_list(messages))]
        strings = [
            *_strings(checked, "messages"),
            *_strings(tools, "tools"),
            *_strings(dict(template_kwargs), "chat_template_kwargs"),
        ]
        marker, end_marker = _unused_characters([*strings, self.source], 2)
        breaker = _SpecialBreaker(special_texts, marker)
        checked = [breaker.apply(message) for message in checked]
        if continue_final_message:
            if checked[-1]["role"] != "assistant":
                raise InvalidRequestError(
                    "continue_final_message needs a last message of role 'assistant', "
                    f"got {checked[-1]['role']!r}",
                    param="continue_final_message",
                )
            checked[-1]["content"] += end_marker
        tool_chars = (
            len(_to_json(tools, indent=4)) if tools else 0
        )  # templates print them like that, or shorter
        text = self._run(
            {
                "documents": None,
                **(variables or {}),
                **breaker.apply(dict(template_kwargs)),
                "messages": checked,
                "tools": breaker.apply(tools) or None,
                "add_generation_prompt": add_generation_prompt and not continue_final_message,
            },
            limit=FREE_OUTPUT_CHARS + OUTPUT_GROWTH * (sum(map(len, strings)) + tool_chars),
        )
        if continue_final_message:
            text, found, _ = text.rpartition(end_marker)
            if not found:
                raise InvalidRequestError(
                    "the model's chat template leaves out the last message, so it can't be continued",
                    param="continue_final_message",
                )
            text = text.replace(end_marker, "")
        return RenderedChat(text, marker)

    def _run(self, context: dict[str, Any], *, limit: int) -> str:
        bounds = _Bounds(self._time_limit_s, limit)
        context[_TICK], context[_CONCAT] = bounds.tick, bounds.concat
        pieces: list[str] = []
        length = 0
        try:
            for piece in self._template.generate(context):
                bounds.tick()
                length += len(piece)
                if length > limit:
                    raise _BoundsError(f"its output is longer than {limit} characters")
                pieces.append(piece)
        except _RefusalError as error:
            raise InvalidRequestError(
                f"the model's chat template refuses: {error}", param="messages"
            ) from error
        except (jinja2.TemplateError, _BoundsError) as error:
            raise InvalidRequestError(
                f"the model's chat template failed: {_one_line(error)}", param="messages"
            ) from error
        except RecursionError:
            raise InvalidRequestError(
                "the model's chat template failed: it nests too deeply", param="messages"
            ) from None
        except Exception as error:  # whatever a template does to values it did not expect
            raise InvalidRequestError(
                f"the model's chat template failed: {type(error).__name__}: {_one_line(error)}",
                param="messages",
            ) from error
        return "".join(pieces)


# -- what clients send -----------------------------------------------------------------------------------------------


def _as_list(messages: Any) -> list[Any]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise InvalidRequestError("messages must be a list of objects", param="messages")
    if not messages:
        raise InvalidRequestError("messages must not be empty", param="messages")
    return list(messages)


def _checked_message(message: Any, index: int) -> dict[str, Any]:
    """A copy of a message whose `content` is text."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise InvalidRequestError(
            f"{where} must be an object, got {type(message).__name__}", param="messages"
        )
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequestError(
            f"{where}.role must be one of {', '.join(sorted(ROLES))}, got {role!r}", param="messages"
        )
    content = message.get("content")
    if content is None:
        if role != "assistant":
            raise InvalidRequestError(f"{where}.content is missing", param="messages")
        content = ""  # an assistant message may consist of tool calls only
    elif isinstance(content, Sequence) and not isinstance(content, str | bytes):
        content = "\n".join(
            _part_text(part, f"{where}.content[{number}]") for number, part in enumerate(content)
        )
    elif not isinstance(content, str):
        raise InvalidRequestError(
            f"{where}.content must be text or a list of text parts, got {type(content).__name__}",
            param="messages",
        )
    return {**message, "content": content}


def _part_text(part: Any, where: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    raise InvalidRequestError(
        f'{where} must be {{"type": "text", "text": ...}}, got {kind!r}', param="messages"
    )


def _strings(value: Any, param: str, depth: int = 0) -> Iterator[str]:
    """Every string in `value`, keys included.

    Raises:
      InvalidRequestError: it is nested too deeply, or a string is no Unicode text.
    """
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"{param} is nested more than {MAX_DEPTH} levels deep", param=param)
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InvalidRequestError(
                f"{param} holds an unpaired surrogate (U+{ord(value[error.start]):04X})", param=param
            ) from None
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key, param, depth + 1)
            yield from _strings(item, param, depth + 1)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item, param, depth + 1)


def _unused_characters(strings: Sequence[str], count: int) -> list[str]:
    """`count` private-use characters that occur in none of `strings`."""
    used = {char for text in strings if not text.isascii() for char in set(text)}
    found = []
    for code in itertools.chain(range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE)):
        if chr(code) not in used:
            found.append(chr(code))
            if len(found) == count:
                return found
    raise InvalidRequestError("messages use every private-use character", param="messages")


class _SpecialBreaker:
    """Puts a marker inside every special token's text, so that it is recognised as one no longer.

    The marker goes after the first character, which leaves the text's beginning, end and white space as they were:
    a template that trims or searches the content still does the same. The beginning or the end of a special token at
    an edge of a string is broken as well, in case a template joins two strings.
    """

    def __init__(self, special_texts: Sequence[str], marker: str) -> None:
        self._marker = marker
        self._specials = [text for text in special_texts if len(text) > 1]
        self._firsts = {text[0] for text in self._specials}

    def apply(self, value: Any) -> Any:
        """A copy of `value` with every string in it treated (lists and objects included, and their keys)."""
        if isinstance(value, str):
            return self._break(value)
        if isinstance(value, Mapping):
            return {self.apply(key): self.apply(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.apply(item) for item in value]
        return value

    def _break(self, text: str) -> str:
        cuts: set[int] = set()
        for special in self._specials:
            at = text.find(special)
            while at >= 0:
                cuts.add(at + 1)
                at = text.find(special, at + 1)
        begin = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        for special in self._specials:
            for size in range(2, min(len(special), end - begin + 1)):
                if text.startswith(special[-size:], begin):
                    cuts.add(begin + 1)
                if text.endswith(special[:size], begin, end):
                    cuts.add(end - size + 1)
        if not cuts:
            return text
        edges = [0, *sorted(cuts), len(text)]
        return self._marker.join(text[a:b] for a, b in itertools.pairwise(edges))


# -- the sandbox -----------------------------------------------------------------------------------------------------


class _RefusalError(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _BoundsError(Exception):
    """The template did more than it may."""


class _Bounds:
    """Time and size limits of one rendering."""

    def __init__(self, seconds: float, max_chars: int) -> None:
        self._seconds = seconds
        self._deadline = time.monotonic() + seconds
        self._max_chars = max_chars

    def tick(self) -> bool:
        """Called in every loop iteration, test and macro."""
        if time.monotonic() > self._deadline:
            raise _BoundsError(f"it ran for more than {self._seconds:g} s")
        return True

    def concat(self, *parts: Any) -> str:
        text = "".join(map(str, parts))
        if len(text) > self._max_chars:
            raise _BoundsError(f"it built a text of more than {self._max_chars} characters")
        return text


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox, which also refuses to build giant values out of small ones."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    max_size = 1 << 26

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sized, count in ((left, right), (right, left)):
                if isinstance(sized, str | list | tuple) and isinstance(count, int):
                    self._require_size(len(sized) * count)
        elif (
            operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple)
        ):
            self._require_size(len(left) + len(right))
        elif operator == "**" and isinstance(right, int) and abs(right) > 1024:
            raise jinja2.sandbox.SecurityError("an exponent is too large")
        elif operator == "%" and isinstance(left, str):
            widths = [int(run) for run in _digit_runs(left)]
            if "*" in left and isinstance(right, tuple):
                widths += [value for value in right if isinstance(value, int)]
            self._require_size(max(widths, default=0))
        return super().call_binop(context, operator, left, right)

    def call(self, context: jinja2.runtime.Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        method = getattr(obj, "__wrapped__", obj)  # the sandbox wraps `str.format`
        text = getattr(method, "__self__", None)
        if isinstance(text, str):  # "".ljust(10**9), "{:999999999}".format(1)
            widths = [value for value in args if isinstance(value, int)]
            if getattr(method, "__name__", "") in ("format", "format_map"):
                # Arguments are widths only in nested fields, "{:{}}".
                widths = widths if ":{" in text else []
                widths += [int(run) for run in _digit_runs(text)]
            self._require_size(max(widths, default=0))
        return super().call(context, obj, *args, **kwargs)

    def _require_size(self, size: int) -> None:
        if size > self.max_size:
            raise jinja2.sandbox.SecurityError(f"a value would have {size} elements")


def _digit_runs(text: str) -> list[str]:
    return "".join(char if char in "0123456789" else " " for char in text).split()


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote, for training; here it changes nothing."""

    tags = {"generation"}  # noqa: RUF012 (as the base class has it)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _bound_loops(tree: nodes.Template, environment: jinja2.Environment) -> None:
    """Make every loop and macro of a template call the tick, and `~` the bounded concatenation."""
    for loop in list(tree.find_all(nodes.For)):
        loop.body.insert(0, nodes.ExprStmt(_call(_TICK)))
        if loop.test is not None:
            loop.test = nodes.And(_call(_TICK), loop.test)
    blocks: list[nodes.Macro | nodes.CallBlock] = [
        *tree.find_all(nodes.Macro),
        *tree.find_all(nodes.CallBlock),
    ]
    for block in blocks:
        block.body.insert(0, nodes.ExprStmt(_call(_TICK)))
    _replace_concat(tree)
    tree.set_environment(environment)
    tree.set_lineno(1)


def _call(name: str, args: Sequence[nodes.Expr] = ()) -> nodes.Call:
    return nodes.Call(nodes.Name(name, "load"), list(args), [], None, None)


def _replace_concat(node: nodes.Node) -> None:
    for name, value in node.iter_fields():
        if isinstance(value, list):
            setattr(node, name, [_bounded_concat(item) for item in value])
        else:
            setattr(node, name, _bounded_concat(value))


def _bounded_concat(value: Any) -> Any:
    if not isinstance(value, nodes.Node):
        return value
    _replace_concat(value)
    return _call(_CONCAT, value.nodes) if isinstance(value, nodes.Concat) else value


def _raise_exception(message: object) -> None:
    raise _RefusalError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Hugging Face's `tojson`: no HTML escaping."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
