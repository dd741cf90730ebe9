"""Which attention backend an engine runs on."""

from __future__ import annotations

import os

import jax

from jaxserve.config import ModelConfig, ResolvedConfig
from jaxserve.errors import ConfigError
from pallas_kernels.paged_attention import AttentionSpec, Backend, DeviceFacts, facts_of, resolve_backend

ENVIRONMENT_VARIABLE = "JAXSERVE_ATTENTION_BACKEND"


def choose_attention(
    model: ModelConfig, config: ResolvedConfig, device: DeviceFacts | None = None
) -> Backend:
    """The backend that the configuration names; where that is "auto", the environment variable may force one.

    Args:
      device: what it will run on; None is the device that is here.

    Raises:
      ConfigError: no backend has that name, or it can't run this model here.
    """
    forced = os.environ.get(ENVIRONMENT_VARIABLE, "") if config.attention_backend == "auto" else ""
    spec = AttentionSpec(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        dtype=config.dtype,
        kv_dtype=config.dtype,
    )
    try:
        return resolve_backend(
            forced or config.attention_backend,
            spec=spec,
            device=device or facts_of(jax.local_devices()[0]),
            deterministic=config.deterministic,
        )
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"{ENVIRONMENT_VARIABLE}: {error}" if forced else str(error)) from error
