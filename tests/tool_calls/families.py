"""Tokenizers and chat templates as families of models have them, the templates in short."""

from __future__ import annotations

import functools
import json

import tokenizers
from tokenizers import AddedToken

from jaxserve.tokenizer import Tokenizer
from tests.text_models import CHATML, smollm2, smollm2_backend_json

HERMES_TEMPLATE = (
    "{%- if tools %}<|im_start|>system\nTools:\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call with <tool_call>\n{...}\n</tool_call><|im_end|>\n{% endif %}"
    "{%- for message in messages %}<|im_start|>"
    "{{ 'user' if message.role == 'tool' else message.role }}\n"
    "{%- if message.role == 'tool' %}<tool_response>\n{{ message.content }}\n</tool_response>"
    "{%- else %}{{ message.content }}{% endif %}"
    "{%- for call in message.tool_calls or [] %}\n<tool_call>\n"
    "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}\n</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MISTRAL_TEMPLATE = (
    "{%- if tools is not none %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'user' %}[INST] {{ message.content }}[/INST]"
    "{%- elif message.tool_calls is defined and message.tool_calls is not none %}[TOOL_CALLS] ["
    "{%- for call in message.tool_calls %}"
    "{%- if call.id | length != 9 %}{{ raise_exception('ids of calls must have 9 characters') }}{% endif %}"
    "{{ call.function | tojson }}{{ ', ' if not loop.last }}{% endfor %}]</s>"
    "{%- elif message.role == 'tool' %}[TOOL_RESULTS] "
    "{{ {'content': message.content, 'call_id': message.tool_call_id} | tojson }}[/TOOL_RESULTS]"
    "{%- else %} {{ message.content }}</s>{% endif %}{% endfor %}"
)
LLAMA3_TEMPLATE = (
    "{%- if custom_tools is defined %}{% set tools = custom_tools %}{% endif %}"
    "{%- if not tools is defined %}{% set tools = none %}{% endif %}"
    '{%- if tools is not none %}Answer with {"name": function, "parameters": {...}}. '
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n{% endfor %}{% endif %}"
    "{%- for message in messages %}"
    "{%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}"
    "<|start_header_id|>{{ message.role }}<|end_header_id|>\n\n{{ message.content | trim }}<|eot_id|>"
    "{%- elif 'tool_calls' in message %}"
    "{%- if message.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}"
    "{%- set call = message.tool_calls[0].function %}<|start_header_id|>assistant<|end_header_id|>\n\n"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>'
    "{%- else %}<|start_header_id|>ipython<|end_header_id|>\n\n{{ message.content | tojson }}<|eot_id|>{% endif %}"
    "{%- endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
# Models whose calls are written otherwise, in frames that look the same.
CODER_TEMPLATE = "{{ tools | tojson }}<tool_call>\n<function=name>\n<parameter=a>\n</tool_call>{{ messages }}"
NEW_MISTRAL_TEMPLATE = "{{ tools | tojson }}[TOOL_CALLS]name[ARGS]{}{{ messages }}"
_SPECIALS = {
    "hermes": (HERMES_TEMPLATE, ()),
    "mistral": (
        MISTRAL_TEMPLATE,
        (
            *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
            *("[TOOL_RESULTS]", "[/TOOL_RESULTS]", "</s>"),
        ),
    ),
    "llama3_json": (
        LLAMA3_TEMPLATE,
        ("<|python_tag|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>"),
    ),
    "coder": (CODER_TEMPLATE, ()),
    "new_mistral": (NEW_MISTRAL_TEMPLATE, ("[TOOL_CALLS]", "[ARGS]")),
    "plain": (CHATML, ()),
}


@functools.cache
def family(name: str) -> Tokenizer:
    """The demo model's vocabulary with that family's control tokens and template; "smollm2" is the demo model's own."""
    if name == "smollm2":
        return smollm2()
    template, specials = _SPECIALS[name]
    backend = tokenizers.Tokenizer.from_str(smollm2_backend_json())
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    if name == "hermes":  # tokens of their own, and no control tokens: as Qwen has them
        backend.add_tokens([AddedToken(t, normalized=False) for t in ("<tool_call>", "</tool_call>")])
    return Tokenizer.from_parts(
        backend, chat_template=template, bos_token="<|im_start|>", eos_token="<|im_end|>"
    )


def tool(name: str = "get_weather", **parameters: object) -> dict[str, object]:
    """A tool as clients define it; one that takes a city unless told otherwise."""
    schema = parameters or {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": "What it says.", "parameters": schema},
    }


def call(name: str, arguments: object, id_: str = "abcdef123") -> dict[str, object]:
    """A call as clients send it back."""
    return {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
