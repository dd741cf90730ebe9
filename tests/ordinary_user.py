"""For tests of file permissions, which root is above."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def ordinary_user() -> Iterator[Path]:
    """A folder in which file permissions count, also for tests that root runs."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        was_root = os.geteuid() == 0
        if was_root:
            os.seteuid(65534)
        try:
            yield Path(name)
        finally:
            if was_root:
                os.seteuid(0)
