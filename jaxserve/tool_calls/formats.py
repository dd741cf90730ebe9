"""The formats that there are, and which of them a model's chat template speaks."""

from __future__ import annotations

from collections.abc import Collection

from jaxserve.errors import ConfigError
from jaxserve.tool_calls.hermes import HERMES
from jaxserve.tool_calls.llama3_json import LLAMA3_JSON
from jaxserve.tool_calls.mistral import MISTRAL
from jaxserve.tool_calls.smollm2 import SMOLLM2
from jaxserve.tool_calls.tool_format import ToolFormat

FORMATS = {one.name: one for one in (HERMES, LLAMA3_JSON, MISTRAL, SMOLLM2)}
AUTO = "auto"
NONE = "none"

# Texts that show a template to speak another language than those above in the same frames.
_OTHER_DIALECTS = ("<function=", "<arg_key>", "[ARGS]", "[CALL_ID]")


def choose_format(name: str, template: str | None, special_texts: Collection[str] = ()) -> ToolFormat | None:
    """The format of that name; None where there is none.

    Args:
      name: of a format, or "none", or "auto": by the chat template.
      template: the source of the chat template, if the model has one.
      special_texts: texts of the model's control tokens.

    Raises:
      ConfigError: no such format.
    """
    if name == AUTO:
        return None if template is None else _spoken_by(template, special_texts)
    if name == NONE:
        return None
    if name not in FORMATS:
        names = ", ".join([AUTO, NONE, *FORMATS])
        raise ConfigError(f"--tool-call-parser must be one of {names}, got {name!r}")
    return FORMATS[name]


def _spoken_by(template: str, special_texts: Collection[str]) -> ToolFormat | None:
    if any(text in template or text in special_texts for text in _OTHER_DIALECTS):
        return None
    if "<tool_call>[" in template or "named SmolLM," in template:
        return SMOLLM2  # templates of the smaller models say nothing of tools, which their training does
    if HERMES.opening in template:
        return HERMES
    if MISTRAL.opening in template:
        return MISTRAL
    if LLAMA3_JSON.opening in special_texts and "ipython" in template and '"parameters"' in template:
        return LLAMA3_JSON
    return None
