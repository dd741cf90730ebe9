"""How an engine stands at a moment, for people to look at: numbers alone, nothing of what anybody asked or was told."""

from __future__ import annotations

import msgspec

# Most steps that an engine notes between two views; beyond it the oldest go.
MAX_NOTED_STEPS = 64
# Most cells of a map of blocks; in a larger pool a cell is several neighbours.
MAX_CELLS = 1024


class StepView(msgspec.Struct, frozen=True):
    """What a step's batch was made of, in tokens: `decode + draft + sum(prefill) + padding == bucket_tokens`.

    Attributes:
      step_id: counts from 0; a failed step leaves a gap.
      bucket_tokens, bucket_seqs: the compiled shape.
      decode: newest tokens of sequences, one each.
      draft: guesses at what follows them, to be verified.
      prefill: the length of each piece of a prompt.
      padding: computed for nobody.
    """

    step_id: int
    bucket_tokens: int
    bucket_seqs: int
    decode: int
    draft: int
    prefill: tuple[int, ...]
    padding: int


class PoolView(msgspec.Struct, frozen=True):
    """The KV blocks, in all and by cell: `blocks_per_cell` blocks in order of their ids, in the last one maybe fewer.

    Attributes:
      num_blocks: on the device.
      used, shared: held by one sequence; by several. cached: by nobody, and still findable by their prefix. The others
        are free.
      blocks_per_cell: 1 up to `MAX_CELLS` blocks.
      used_cells, shared_cells, cached_cells: how many of a cell's blocks.
      host_blocks, host_used, host_pinned: in host memory: room, those that hold something, those kept for preempted
        sequences (or promised to them).
    """

    num_blocks: int
    used: int
    shared: int
    cached: int
    blocks_per_cell: int
    used_cells: tuple[int, ...]
    shared_cells: tuple[int, ...]
    cached_cells: tuple[int, ...]
    host_blocks: int
    host_used: int
    host_pinned: int


class Percentiles(msgspec.Struct, frozen=True):
    """Of times in seconds; null without any."""

    count: int
    p50: float | None = None
    p90: float | None = None
    p99: float | None = None


class EngineView(msgspec.Struct, frozen=True):
    """All of it.

    Attributes:
      steps: run since the view before, the newest last; at most `MAX_NOTED_STEPS`.
      running, waiting: sequences by service class. waiting_tokens: that the waiting ones have to compute.
      num_steps, prompt_tokens, cached_prompt_tokens, generation_tokens: from the start on, as in `EngineStats`; so are
        useful_tokens, padded_tokens and preemptions.
      ttft, itl: times to first token and between tokens, of the last minute, as far as somebody has watched.
    """

    steps: tuple[StepView, ...]
    pool: PoolView
    running: dict[str, int]
    waiting: dict[str, int]
    waiting_tokens: int
    num_steps: int
    prompt_tokens: int
    cached_prompt_tokens: int
    generation_tokens: int
    useful_tokens: int
    padded_tokens: int
    preemptions: int
    ttft: Percentiles
    itl: Percentiles
