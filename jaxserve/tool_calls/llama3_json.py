"""Llama 3.1, 3.2 and 3.3, calls as JSON.

    {"name": "get_weather", "parameters": {"city": "Oslo"}}

The object is the whole output, or stands behind the control token `<|python_tag|>`; several are separated by
semicolons. Source: https://www.llama.com/docs/model-cards-and-prompt-formats/llama3_1
"""

from __future__ import annotations

from jaxserve.tool_calls.tool_format import ToolFormat

LLAMA3_JSON = ToolFormat(
    "llama3_json", "<|python_tag|>", begins_bare=True, between="; ", arguments_key="parameters"
)
