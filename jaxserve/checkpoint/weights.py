"""Weights in a file, whichever format: what is there, whether it fits the model, and how it reaches the device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from jaxserve.config import Quantization
from jaxserve.errors import CheckpointError
from jaxserve.models.registry import WeightSpec, set_by_path

if TYPE_CHECKING:
    import jax
    from jax.sharding import Sharding

    from jaxserve.progress import Progress

    # One sharding for all leaves, or one chosen for each.
    ShardingChoice = Sharding | Callable[[WeightSpec], Sharding] | None
    DtypeChoice = Callable[[WeightSpec], Any]

# Files may carry these without harm: buffers that old exporters saved and that follow from the config.
_HARMLESS = re.compile(r"(^|\.)rotary_emb\.(inv_freq|cos_cached|sin_cached)$|(^|\.)(masked_bias|attn\.bias)$")
_SHOWN_DIFFERENCES = 4


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as a file describes it. `dtype` is the name of the type that `WeightReader.read` would return."""

    shape: tuple[int, ...]
    dtype: str
    file: Path


class WeightReader(Protocol):
    """Tensors of one checkpoint, matched with the model's parameters; nothing is read before it is asked for."""

    @property
    def specs(self) -> Sequence[WeightSpec]:
        """The parameters that the checkpoint holds."""

    def leaf_dtype(self, spec: WeightSpec) -> str:
        """Name of the type in which this leaf's values are exact."""

    def load(
        self, dtype_of: DtypeChoice, sharding: ShardingChoice, progress: Progress | None
    ) -> Iterator[tuple[WeightSpec, jax.Array]]:
        """Every leaf on the device, in the type chosen for it; few at a time, so that who shrinks them never has all.

        Raises:
          CheckpointError: the file is damaged.
        """


def check_tensors(
    specs: Iterable[WeightSpec],
    tensors: Mapping[str, TensorInfo],
    *,
    name_of: Callable[[WeightSpec], str],
    where: Path,
    expected_by: str,
    ignored: Callable[[str], bool] = lambda name: False,
) -> None:
    """Compare what the file has with what the model needs.

    Args:
      tensors: by the name they have in the file.
      name_of: a parameter's name in this kind of file.
      expected_by: who says so, e.g. "config.json"; part of the message.
      ignored: further names that may be in the file although the model has no use for them.

    Raises:
      CheckpointError: one line with the first few differences and how many more there are.
    """
    differences: list[str] = []
    expected = {name_of(spec): spec for spec in specs}
    for name, spec in expected.items():
        info = tensors.get(name)
        if info is None:
            if not spec.optional:
                differences.append(f"{name} is missing ({expected_by} asks for it)")
        elif info.shape != spec.shape:
            place = f" in {info.file.name}" if info.file != where else ""
            differences.append(
                f"{name}{place} has shape {list(info.shape)}, {expected_by} asks for {list(spec.shape)}"
            )
    for name in tensors:
        if name not in expected and not _HARMLESS.search(name) and not ignored(name):
            differences.append(f"{name} is not part of the model that {expected_by} describes")
    if differences:
        raise CheckpointError(f"{where}: {summarise(differences)}")


def summarise(differences: Sequence[str]) -> str:
    """The first few on one line, and the number of the others."""
    more = len(differences) - _SHOWN_DIFFERENCES
    text = "; ".join(differences[:_SHOWN_DIFFERENCES])
    return f"{text}; and {more} more differences" if more > 0 else text


def place_on_device(array: np.ndarray, dtype: Any, sharding: Sharding) -> jax.Array:
    """Cast on the host, where the source array is freed at once, then transfer.

    On a CPU the device array may alias `array`, so that must not be a view of a mapped file.

    A cast that overflows gives inf, which `check_finite` then refuses.
    """
    import jax

    with np.errstate(over="ignore"):
        host = np.asarray(array, dtype)
    return jax.device_put(host, sharding)


def sharding_of(choice: ShardingChoice, spec: WeightSpec) -> Sharding:
    """The sharding chosen for a leaf; without a choice, the default device."""
    import jax

    if choice is None:
        return jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if isinstance(choice, jax.sharding.Sharding):
        return choice
    return choice(spec)


def load_from_host(
    reader: WeightReader,
    read: Callable[[WeightSpec], np.ndarray],
    dtype_of: DtypeChoice,
    sharding: ShardingChoice,
    progress: Progress | None,
) -> Iterator[tuple[WeightSpec, jax.Array]]:
    """`WeightReader.load` for files that are read tensor by tensor: one host copy at a time."""
    import jax.numpy as jnp

    for done, spec in enumerate(reader.specs):
        if progress is not None:
            progress("Loading weights", done, len(reader.specs))
        yield spec, place_on_device(read(spec), jnp.dtype(dtype_of(spec)), sharding_of(sharding, spec))
    if progress is not None:
        progress("Loading weights", len(reader.specs), len(reader.specs))


def quantise(
    leaves: Iterable[tuple[WeightSpec, jax.Array]], quantization: Quantization | None
) -> Iterator[tuple[WeightSpec, jax.Array]]:
    """The same leaves, each matrix that `quantization` wants as int8 followed by its scales."""
    import jax

    from jaxserve.models.quantization import is_quantised, quantise_rows, scale_spec

    compiled = jax.jit(quantise_rows)
    for spec, array in leaves:
        if is_quantised(spec, quantization):
            rounded, scale = compiled(array)
            del array
            yield spec, rounded
            yield scale_spec(spec), scale[:, 0]
        else:
            yield spec, array


def check_finite(arrays: Mapping[WeightSpec, jax.Array], where: Path) -> None:
    """Refuse NaN and infinity: one of them in a weight turns every answer into token 0 for ever.

    Reduced on the device; one number a tensor comes back.

    Raises:
      CheckpointError: names the first such tensors.
    """
    import jax
    import jax.numpy as jnp

    # A sum is one compiled reduction a shape, and NaN and infinity survive it. Sums of finite values can overflow as
    # well, so those few that look bad are looked at again.
    sums = jax.device_get([jnp.sum(array, dtype=jnp.float32) for array in arrays.values()])
    suspects = [spec for spec, total in zip(arrays, sums, strict=True) if not np.isfinite(total)]
    names = [spec.hf_name for spec in suspects if not jnp.isfinite(arrays[spec]).all()]
    if names:
        dtype = next(iter(arrays.values())).dtype.name
        raise CheckpointError(
            f"{where}: {', '.join(names[:_SHOWN_DIFFERENCES])} "
            f"{'holds' if len(names) == 1 else 'hold'} NaN or infinite values (as {dtype})"
            + (
                f"; and {len(names) - _SHOWN_DIFFERENCES} more tensors"
                if len(names) > _SHOWN_DIFFERENCES
                else ""
            )
        )


def as_tree(arrays: Mapping[WeightSpec, Any]) -> dict[Any, Any]:
    """Nested dict keyed by each spec's path."""
    tree: dict[Any, Any] = {}
    for spec, array in arrays.items():
        set_by_path(tree, spec.path, array)
    return tree


def main_dtype(reader: WeightReader) -> str:
    """The type that holds most of the weights."""
    sizes: dict[str, int] = {}
    for spec in reader.specs:
        name = reader.leaf_dtype(spec)
        sizes[name] = sizes.get(name, 0) + int(np.prod(spec.shape))
    return max(sizes, key=lambda name: sizes[name])
