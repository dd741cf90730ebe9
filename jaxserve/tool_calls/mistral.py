"""Mistral's models up to the tokenizer's third version.

    [TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Oslo"}}]

The opening is a control token, and nothing closes the list. Ids of calls have nine letters and digits, which the
family's templates insist on. Source: https://docs.mistral.ai/capabilities/function_calling
"""

from __future__ import annotations

from jaxserve.tool_calls.tool_format import ListUse, ToolFormat

MISTRAL = ToolFormat(
    "mistral", "[TOOL_CALLS]", lists=ListUse.ALWAYS, between=", ", padding=" ", call_id_length=9
)
