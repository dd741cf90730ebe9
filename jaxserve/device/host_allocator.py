"""What the C library does with freed memory."""

from __future__ import annotations

import ctypes
import os
import sys

# Of glibc's malloc.h.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_ALWAYS, _LARGEST_ON_OLD_VERSIONS = 2**30, 2**25


def keep_freed_memory() -> bool:
    """Let glibc keep what a step frees, for the next step; for the whole process.

    By default it gives megabytes (a step's logits) back to the kernel, which has to clear them again, page by page:
    12,000 page faults a step of 64 rows of 49,152 logits.

    Returns:
      False where nothing was done: there is no glibc, or its environment variables say how it shall behave.
    """
    if "MALLOC_" in " ".join(os.environ) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    mapped = mallopt(_MMAP_THRESHOLD, _ALWAYS) or mallopt(_MMAP_THRESHOLD, _LARGEST_ON_OLD_VERSIONS)
    return bool(mapped and mallopt(_TRIM_THRESHOLD, _ALWAYS))


def release_free_memory() -> None:
    """Give back what compiling and loading have freed; glibc keeps it otherwise, hundreds of megabytes."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
