"""Outputs that keep to a grammar: JSON, JSON Schema, regular expressions, choices, Lark grammars.

`llguidance` says which tokens may come next; a mask of them goes to the device with every step (`device.sampling`).
"""

from jaxserve.structured_output.grammar import Grammar, GrammarKind

__all__ = ["Grammar", "GrammarKind"]
