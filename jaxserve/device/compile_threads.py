"""Compiling several programs at once: XLA does it outside Python's lock."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from jaxserve.progress import Progress


def in_threads[Key, Made](
    make: Callable[[Key], Made], keys: Sequence[Key], *, threads: int, progress: Progress, what: str
) -> Iterator[tuple[Key, Made]]:
    """(key, make(key)) of every key, as they come; an error ends it, and what has not begun then never does."""
    progress(what, 0, len(keys))
    with ThreadPoolExecutor(max_workers=threads, thread_name_prefix="compile") as pool:
        futures = {pool.submit(make, key): key for key in keys}
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                yield futures[future], future.result()
                progress(what, done, len(keys))
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
