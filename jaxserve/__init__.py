"""jaxserve: a JAX/XLA inference engine. Importing this package starts no device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxserve.completion import ChoiceOutput as ChoiceOutput
    from jaxserve.completion import Completion as Completion
    from jaxserve.config import EngineConfig as EngineConfig
    from jaxserve.grammar import Grammar as Grammar
    from jaxserve.grammar import GrammarKind as GrammarKind
    from jaxserve.llm import LLM as LLM
    from jaxserve.request import SamplingParams as SamplingParams
    from jaxserve.request import ServiceClass as ServiceClass
    from jaxserve.request import ServiceTargets as ServiceTargets

__version__ = "0.1.0"

_PUBLIC = {
    "LLM": "jaxserve.llm",
    "Completion": "jaxserve.completion",
    "ChoiceOutput": "jaxserve.completion",
    "SamplingParams": "jaxserve.request",
    "ServiceClass": "jaxserve.request",
    "ServiceTargets": "jaxserve.request",
    "EngineConfig": "jaxserve.config",
    "Grammar": "jaxserve.grammar",
    "GrammarKind": "jaxserve.grammar",
}
__all__ = [
    "LLM",
    "ChoiceOutput",
    "Completion",
    "EngineConfig",
    "Grammar",
    "GrammarKind",
    "SamplingParams",
    "ServiceClass",
    "ServiceTargets",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return getattr(importlib.import_module(_PUBLIC[name]), name)
    raise AttributeError(f"module 'jaxserve' has no attribute {name!r}")
