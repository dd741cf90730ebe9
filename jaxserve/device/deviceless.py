"""Compiling for a GPU that is not there. Needs the CUDA plugin of JAX, neither a driver nor a device."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import jax
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, SingleDeviceSharding

from jaxserve.device.program_manifest import DeviceIdentity, plugin_versions
from jaxserve.device.targets import Target
from jaxserve.errors import ConfigError


def target_sharding(target: Target) -> SingleDeviceSharding:
    """Where arrays of a program for the target lie.

    Raises:
      ConfigError: the plugin is not installed.
    """
    if not plugin_versions():
        raise ConfigError(
            f"compiling for {target.name} needs JAX's CUDA plugin: install jax-cuda13-plugin and jax-cuda13-pjrt"
        )
    topology = topologies.get_topology_desc(platform="cuda", target_config=target.config, topology="1x1x1")
    return SingleDeviceSharding(topology.devices[0])


def identity_of(target: Target) -> DeviceIdentity:
    """What a start on the real device finds programs by."""
    return DeviceIdentity("gpu", target.device_kind, plugin_versions())


@contextmanager
def lowering_for(target: Target) -> Iterator[None]:
    """In this thread, programs are lowered for the target: Pallas asks the current mesh for its device."""
    device = AbstractDevice(device_kind=target.device_kind, num_cores=target.facts.num_sms, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        yield
