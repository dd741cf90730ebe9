"""SmolLM2.

    <tool_call>[{"name": "get_weather", "arguments": {"city": "Oslo"}}]</tool_call>

One list holds all calls; an empty one says that none is needed. A single object without its list is read as well.
Source: the model card of https://huggingface.co/HuggingFaceTB/SmolLM2-1.7B-Instruct
"""

from __future__ import annotations

from jaxserve.tool_calls.tool_format import ListUse, ToolFormat

SMOLLM2 = ToolFormat("smollm2", "<tool_call>", "</tool_call>", lists=ListUse.OPTIONAL, between=", ")
