"""What moving KV blocks to host memory and back takes, next to computing their tokens again."""

from __future__ import annotations

import statistics
import time
from contextlib import closing
from dataclasses import asdict, dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.bench.environment import describe_environment
from jaxserve.config import EngineConfig, ResolvedConfig, replace
from jaxserve.device.block_swap import BlockSwap
from jaxserve.device.host_pool import HostPool
from jaxserve.device.kv_cache import KVCache, block_bytes
from jaxserve.device.program_definitions import describe_programs, make_state
from jaxserve.device.programs import ProgramMaker
from jaxserve.engine import EngineCore
from jaxserve.engine_factory import create_engine
from jaxserve.engine_setup import EngineSetup, set_up
from jaxserve.progress import Progress
from jaxserve.request import GenerationRequest, SamplingParams
from pallas_kernels.paged_attention import facts_of


@dataclass(frozen=True, slots=True)
class SwapTimes:
    """Seconds for the same tokens, of every repeat.

    Attributes:
      num_bytes: that their blocks hold.
      out, back: to host memory, and from there; nothing else runs meanwhile.
      computed: as a prompt of its own.
    """

    model: str
    config: ResolvedConfig
    num_tokens: int
    num_bytes: int
    out: tuple[float, ...]
    back: tuple[float, ...]
    computed: tuple[float, ...]


def measure_swap(
    model: str, options: EngineConfig, *, num_tokens: int, repeats: int, progress: Progress
) -> SwapTimes:
    """Move the blocks of `num_tokens` out and in, and compute a prompt as long, in turn.

    Raises:
      JaxserveError: the model or the options can't be used.
    """
    block_size = options.block_size
    num_blocks = -(-num_tokens // block_size)
    options = replace(
        options,
        enable_prefix_caching=False,
        num_blocks=options.num_blocks or num_blocks + 1,
        host_memory=2**30,  # so that there are programs for it
    )
    setup = set_up(model, options, facts_of(jax.local_devices()[0]), store=None, progress=progress)
    each = block_bytes(setup.checkpoint.config, block_size, jnp.dtype(setup.config.dtype))
    with closing(create_engine(model, options, progress=progress)) as engine:
        swap, cache = _swap_of(setup, num_blocks, each)
        out, back, computed = [], [], []
        _compute(engine, num_tokens, -1)
        for repeat in range(repeats):
            cache = swap.calibrate(cache, num_blocks)
            moved = swap.take_transfers()
            out.append(moved.out_seconds)
            back.append(moved.in_seconds)
            computed.append(_compute(engine, num_tokens, repeat))
    return SwapTimes(
        engine.model_name,
        setup.config,
        num_tokens,
        num_blocks * each,
        tuple(out),
        tuple(back),
        tuple(computed),
    )


def _swap_of(setup: EngineSetup, num_blocks: int, each: int) -> tuple[BlockSwap, KVCache]:
    """A swap beside the engine's, over a cache of its own, and that."""
    model, config = setup.checkpoint.config, setup.config
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    programs = describe_programs(
        model,
        config,
        attention=setup.attention,
        num_blocks=num_blocks,
        platform=jax.default_backend(),
        sharding=sharding,
    )
    pool = HostPool(num_blocks, each, np.dtype(jnp.dtype(config.dtype)))
    swap = BlockSwap(pool, ProgramMaker(programs, None), block_bytes=each, clock=time.perf_counter)
    return swap, make_state(model, config, num_blocks).kv_cache


def _compute(engine: EngineCore, num_tokens: int, number: int) -> float:
    """Seconds from a prompt's arrival to its first token."""
    prompt = tuple((number * 37 + i * 11) % 9000 + 100 for i in range(num_tokens))
    params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    started = time.perf_counter()
    engine.submit(GenerationRequest(f"prompt{number}", prompt, params))
    while engine.has_work():
        engine.step()
    return time.perf_counter() - started


def report(times: SwapTimes) -> str:
    """The result as text. Its last line is ``ratio=X.X``, computing over moving."""
    out, back, computed = (statistics.median(x) for x in (times.out, times.back, times.computed))
    per = 1000 / times.num_tokens
    rate = lambda seconds: f"{times.num_bytes / seconds / 1e9:.2f} GB/s"  # noqa: E731
    return "\n".join(
        (
            "",
            f"{times.model}, {times.config.dtype}: {times.num_tokens} tokens, {times.num_bytes / 1e6:.1f} MB in "
            f"blocks of {times.config.block_size}; medians of {len(times.out)}, for 1,000 tokens:",
            f"  to host memory  {out * per * 1e3:9.1f} ms  {rate(out)}",
            f"  and back        {back * per * 1e3:9.1f} ms  {rate(back)}",
            f"  computed again  {computed * per * 1e3:9.1f} ms",
            f"ratio={computed / (out + back):.1f}",
        )
    )


def to_json(times: SwapTimes) -> dict[str, object]:
    return {"environment": describe_environment(), **asdict(times)}
