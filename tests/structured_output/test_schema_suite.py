"""The JSON Schema Test Suite (draft 2020-12): no schema that is taken lets anything through that it forbids.

Data: tests/data/json_schema_suite, from https://github.com/json-schema-org/JSON-Schema-Test-Suite, one schema a line.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from jaxserve.errors import InvalidRequestError
from jaxserve.grammar import Grammar
from jaxserve.structured_output.compiler import GrammarCompiler
from tests.text_models import smollm2

SUITE = Path(__file__).parents[1] / "data" / "json_schema_suite" / "draft2020-12.jsonl"


def test_what_a_schema_forbids_never_comes() -> None:
    tokenizer = smollm2()
    compiler = GrammarCompiler(tokenizer, 49152, [2])
    seen: Counter[object] = Counter()
    for line in SUITE.read_text().splitlines():
        case = json.loads(line)
        try:
            start = compiler.compile(Grammar.json_schema(case["schema"]))
        except InvalidRequestError:
            seen["refused"] += 1
            continue
        seen["taken"] += 1
        for instance in case["tests"]:
            text = json.dumps(instance["data"], ensure_ascii=False)
            tokens = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
            if tokenizer.decode(tokens, skip_special_tokens=False) != text:
                continue  # SmolLM2 has no tokens for some bytes
            matcher = start.deep_copy()
            accepted = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
            seen[instance["valid"], accepted] += 1
            assert instance["valid"] or not accepted, (case["file"], case["description"], text)
    # Of what is valid, objects with their keys in another order than the schema's are left out on purpose.
    assert seen["taken"] >= 150
    assert seen[False, False] >= 200
    assert seen[True, True] >= 300
    assert seen[True, True] > 10 * seen[True, False]
