"""The programs of an engine, ready to call: loaded from disk, or else compiled."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxserve.batch.bucket import Bucket
from jaxserve.batch.buckets import ShapeBuckets
from jaxserve.batch.ready_buckets import in_order_of_use
from jaxserve.device.compile_threads import in_threads
from jaxserve.device.compiled import BuildStoppedError
from jaxserve.device.draft import DraftParts, ForwardParts, draft_step, follow_step, repeat_on_host
from jaxserve.device.draft_model import DraftModel
from jaxserve.device.executable_cache import ExecutableCache
from jaxserve.device.program_definitions import (
    COPY_BLOCKS,
    GATHER_BLOCKS,
    LOAD_ROW,
    SCATTER_BLOCKS,
    Definition,
    Programs,
    observe,
    parts_of_draft,
    parts_of_follow,
    parts_of_step,
    state_program,
    whole_draft,
    whole_follow,
    whole_step,
)
from jaxserve.device.program_manifest import DeviceIdentity, local_device, make_manifest
from jaxserve.device.step import serve_step
from jaxserve.device.step_parts import StepModel, StepParts
from jaxserve.device.traced_sources import hash_sources, traced_sources
from jaxserve.progress import Progress


@dataclass(frozen=True, slots=True)
class DraftKey:
    """Drafting for a batch of one-token rows."""

    bucket: Bucket


@dataclass(frozen=True, slots=True)
class FollowKey:
    """The draft model's part in a step."""

    bucket: Bucket


@dataclass(frozen=True, slots=True)
class ObserveKey:
    """What an exit keeps of a step."""

    bucket: Bucket


ProgramKey = Bucket | DraftKey | FollowKey | ObserveKey | str


def essential_keys(
    buckets: ShapeBuckets, *, swaps: bool, draft: DraftModel | None = None
) -> list[ProgramKey]:
    """With these an engine can run any step: the largest shape first, and the smallest.

    Args:
      swaps, draft: see `Programs`.
    """
    largest, *smallest = in_order_of_use(buckets.all_buckets())[:2]
    moves = [GATHER_BLOCKS, SCATTER_BLOCKS] if swaps else []
    return [
        *_step_keys([largest], draft),
        COPY_BLOCKS,
        LOAD_ROW,
        *moves,
        *_step_keys(smallest, draft),
        *_draft_keys(smallest, _drafted(buckets, draft)),
    ]


def program_keys(buckets: ShapeBuckets, *, swaps: bool, draft: DraftModel | None = None) -> list[ProgramKey]:
    """Everything that an engine may ever run, the essential ones first."""
    keys = essential_keys(buckets, swaps=swaps, draft=draft)
    ordered, drafted = in_order_of_use(buckets.all_buckets()), _drafted(buckets, draft)
    for bucket in ordered[2:]:
        keys += [*_step_keys([bucket], draft), *_draft_keys([bucket], drafted)]
    return [*keys, *_draft_keys(ordered[:1], drafted)]


def _step_keys(buckets: Sequence[Bucket], draft: DraftModel | None) -> list[ProgramKey]:
    """A shape is ready once the last of its keys is."""
    keys: list[ProgramKey] = []
    for bucket in buckets:
        if draft is not None and draft.is_own:
            keys.append(FollowKey(bucket))
        if draft is not None and draft.exit is not None:
            keys.append(ObserveKey(bucket))
        keys.append(bucket)
    return keys


def _drafted(buckets: ShapeBuckets, draft: DraftModel | None) -> set[Bucket]:
    """Shapes that batches of one-token rows come in, once all shapes are ready; none where nothing is drafted."""
    return buckets.decode_buckets() if draft else set()


def _draft_keys(buckets: Sequence[Bucket], drafted: set[Bucket]) -> list[ProgramKey]:
    return [DraftKey(bucket) for bucket in buckets if bucket in drafted]


def definitions_for(programs: Programs, key: ProgramKey) -> dict[str, Definition]:
    """What the program of a key is made of, by part; a single one where it is not cut into parts."""
    if isinstance(key, str):
        return {key: state_program(programs, key)}
    if isinstance(key, ObserveKey):
        return {"observe": observe(programs, key.bucket)}
    if isinstance(key, Bucket):
        parts, whole, bucket = parts_of_step, whole_step, key
    elif isinstance(key, FollowKey):
        parts, whole, bucket = parts_of_follow, whole_follow, key.bucket
    else:
        parts, whole, bucket = parts_of_draft, whole_draft, key.bucket
    return parts(programs, bucket) if programs.by_layer else {"whole": whole(programs, bucket)}


def open_cache(programs: Programs, directory: Path, device: DeviceIdentity) -> ExecutableCache | None:
    """Where these programs are kept for a device; None if they can't be, as an interpreter's callbacks."""
    if programs.identity["attention"]["backend"].interpret:
        return None
    return ExecutableCache(directory, make_manifest(programs.identity, _SOURCES, device))


class ProgramMaker:
    """Makes the program of a key. Safe from several threads at once.

    Args:
      cache_directory: where compiled programs are kept between starts; None keeps none.

    Attributes:
      programs: what it makes.
      num_compiled: programs that were not found there.
    """

    def __init__(self, programs: Programs, cache_directory: Path | None) -> None:
        self.programs = programs
        self._lock = threading.Lock()
        self._made: dict[str, Future[Any]] = {}
        self._stopped = threading.Event()
        self.num_compiled = 0
        self.cache = open_cache(programs, cache_directory, local_device()) if cache_directory else None

    def __call__(self, key: ProgramKey) -> Any:
        """The program, ready to call with arrays of the described shapes.

        That of a bucket is `serve_step` with its first argument given, or `serve_whole_step` where it is not cut into
        parts; those of drafts are functions of `device.draft` with their first one given.
        """
        programs = self.programs
        if isinstance(key, str | ObserveKey) or not programs.by_layer:
            [only] = definitions_for(programs, key).values()
            return self._make(only)
        if isinstance(key, Bucket):
            return partial(serve_step, self.make_parts(key))
        assert programs.draft is not None
        made, layers = self._make_all(definitions_for(programs, key), programs.draft.model)
        if isinstance(key, FollowKey):
            return partial(follow_step, ForwardParts(made["begin"], layers))
        return partial(draft_step, DraftParts(made["begin"], layers, made["next"]), repeat=repeat_on_host)

    def prepare(self, keys: Sequence[ProgramKey], *, threads: int, progress: Progress) -> list[Any]:
        """Make programs now, `threads` at a time; who asks for them later gets these."""
        what = "Preparing the first shapes"
        return [
            program for _, program in in_threads(self, keys, threads=threads, progress=progress, what=what)
        ]

    def stop(self) -> None:
        """Make no further program: BuildStoppedError for whoever is at it, once the one it makes is done."""
        self._stopped.set()

    def close(self) -> None:
        """Drop all programs; others may remove what is kept on disk."""
        self._made.clear()
        if self.cache:
            self.cache.close()

    def make_parts(self, bucket: Bucket) -> StepParts:
        """A bucket's step as a program for each part."""
        made, layers = self._make_all(parts_of_step(self.programs, bucket), self.programs.model)
        return StepParts(made["begin"], layers, made["select"], made["sample"], made["score"])

    def _make_all(
        self, definitions: Mapping[str, Definition], model: StepModel
    ) -> tuple[dict[str, Any], tuple[Any, ...]]:
        """(programs by part, those of the model's layers)"""
        made = {name: self._make(part) for name, part in definitions.items()}
        return made, tuple(made[f"layer{kind}"] for kind in model.kinds)

    def _make(self, definition: Definition) -> Any:
        """The one program of a definition's name: shapes share some, and two threads may ask at once."""
        with self._lock:
            future = self._made.get(definition.name)
            mine = future is None
            if future is None:
                future = self._made[definition.name] = Future()
        if mine:
            try:
                future.set_result(self._load_or_compile(definition))
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _load_or_compile(self, definition: Definition) -> Any:
        if self._stopped.is_set():
            raise BuildStoppedError
        name = definition.name
        program = self.cache.load(name, definition.in_tree, definition.out_tree) if self.cache else None
        if program is None:
            program = definition.compile()
            with self._lock:
                self.num_compiled += 1
            if self.cache:
                self.cache.store(name, program)
        return program


# Now, while the files are what was imported: who edits them under a running process must not mislabel its programs.
_SOURCES = hash_sources(traced_sources())
