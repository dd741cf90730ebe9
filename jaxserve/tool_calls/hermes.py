"""Hermes 2 Pro and later, Qwen 2.5, Qwen 3 and many others.

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Oslo"}}
    </tool_call>

Several calls are several such blocks. Source: https://github.com/NousResearch/Hermes-Function-Calling
"""

from __future__ import annotations

from jaxserve.tool_calls.tool_format import ToolFormat

HERMES = ToolFormat("hermes", "<tool_call>", "</tool_call>", between="\n", padding="\n")
