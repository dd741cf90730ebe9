"""The policy that a configuration names by import path."""

from __future__ import annotations

import importlib

from jaxserve.config import ResolvedConfig
from jaxserve.errors import ConfigError
from jaxserve.scheduler.fair_policy import FairPolicy
from jaxserve.scheduler.policy import Policy

_METHODS = ("order", "admitted", "ended", "is_long", "lane_share", "divide")


def load_policy(config: ResolvedConfig) -> Policy:
    """A new policy, `config.policy` or else `FairPolicy`.

    Raises:
      ConfigError: the path names nothing, or nothing that has what `Policy` asks for.
    """
    if config.policy is None:
        return FairPolicy(config)
    path = config.policy
    module_name, _, class_name = path.partition(":")
    if not module_name or not class_name:
        raise ConfigError(f"policy must be package.module:Class, got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # whatever the file does when it is imported
        raise ConfigError(
            f"policy {path!r}: importing {module_name} failed: {type(error).__name__}: {error}"
        ) from error
    found = getattr(module, class_name, None)
    if not isinstance(found, type):
        raise ConfigError(f"policy {path!r}: {module_name} has no class {class_name}")
    if missing := [name for name in _METHODS if not callable(getattr(found, name, None))]:
        raise ConfigError(
            f"policy {path!r} lacks {', '.join(missing)} (see jaxserve.scheduler.policy.Policy)"
        )
    try:
        policy: Policy = found(config)
    except Exception as error:
        raise ConfigError(
            f"policy {path!r} could not be made with the configuration: {type(error).__name__}: {error}"
        ) from error
    chunk = getattr(policy, "max_prefill_chunk", None)
    if not isinstance(chunk, int) or chunk < 1:
        raise ConfigError(
            f"policy {path!r}: max_prefill_chunk must be an integer of at least 1, got {chunk!r}"
        )
    return policy
