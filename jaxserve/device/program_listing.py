"""What compiled programs there are on disk, for people."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxserve import file_lock
from jaxserve.device.program_eviction import MANIFEST, KeptPrograms, kept_programs, mebibytes


def list_programs(root: Path) -> Iterator[str]:
    """A line for each manifest's programs, the least recently used first: size, last use, for what; then the sum."""
    kept = kept_programs(root)
    for each in kept:
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(each.last_used))
        in_use = ", in use now" if file_lock.in_use(each.folder) else ""
        yield f"{each.folder.name[:8]} {size_of([each]):>10}  last used {used}  {_described(each.folder)}{in_use}"
    yield f"{len(kept)} sets of programs, {size_of(kept)}: {root}"


def size_of(kept: list[KeptPrograms]) -> str:
    return mebibytes(sum(each.num_bytes for each in kept))


def _described(folder: Path) -> str:
    """Model, numbers and device, as far as the manifest says."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        manifest: Mapping[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        model, device = manifest["model"], manifest["device"]
        quantization = f" + {manifest['quantization']}" if manifest["quantization"] else ""
        mode = ", deterministic" if manifest["deterministic"] else ""
        return (
            f"{model['architecture']} of {model['num_layers']} layers, hidden size {model['hidden_size']}, "
            f"{manifest['dtype']}{quantization}{mode}, {manifest['max_num_seqs']} sequences, "
            f"{manifest['num_blocks']} blocks of {manifest['block_size']}, {device['kind']}, jax {manifest['jax']}"
        )
    return "no manifest that can be read"
