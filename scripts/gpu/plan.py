"""Which jobs a run of `scripts/gpu_check` consists of: everything that is asked of a device, as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripts.gpu.jobs import Case, Job

PALLAS = ("pallas-mosaic-gpu", "pallas-triton")
BACKENDS = ("xla", *PALLAS)
GROUPS = (1, 3, 4, 7, 8, 16)
HEAD_DIMS = (64, 96, 128, 256)

# Llama-3.1-8B.
EIGHT_B_ATTENTION = {"group": 4, "kv_heads": 8, "head_dim": 128, "block_size": 16, "dtype": "bfloat16"}
EIGHT_B = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
}
SMALL = {
    "vocab_size": 1024,
    "hidden_size": 384,
    "intermediate_size": 512,
    "num_layers": 3,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
}
TINY = SMALL | {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_layers": 1,
    "num_heads": 2,
}
TINY |= {"num_kv_heads": 1}

# As many tokens as a layer's cache may have before kernels need 64-bit offsets. Larger ones are checked, not timed: an
# engine's caches are smaller.
_POOL_TOKENS = 2**21

_SHARED_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # jobs that run at the same time
_ALL_MEMORY = {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".90"}


def environment_job() -> Job:
    return Job(
        "environment",
        "environment",
        [{"name": "environment", "kind": "environment"}],
        budget_s=90,
        environment=_SHARED_MEMORY,
    )


def check_jobs(*, cpu: bool) -> list[Job]:
    """Everything that must be right. These jobs may run at the same time."""
    jobs = []
    for backend in BACKENDS:
        cases = _few_cases(backend) if cpu else attention_cases(backend)
        # Compiling takes most of the time, and cores are plenty.
        shards = 1 if cpu else 3 if backend == "xla" else 5
        for shard in range(shards):
            name = f"correctness {backend}" + (f" {shard + 1}/{shards}" if shards > 1 else "")
            jobs.append(_check(name, "correctness", cases[shard::shards]))
    if not cpu:
        jobs += [
            _check(f"large caches {backend}", "correctness", large_cache_cases(backend)) for backend in PALLAS
        ]
    engines = PALLAS[-1:] if cpu else PALLAS
    jobs += [_check(f"engine {backend}", "engine", engine_cases(backend, cpu=cpu)) for backend in engines]
    return jobs


def speed_jobs(*, cpu: bool) -> list[Job]:
    """Timings, most important first. One at a time: each has the device to itself."""
    if cpu:
        cases = [*_ceiling_cases(cpu), *speed_cases("pallas-triton", cpu=cpu)]
        cases += [*_alternative_cases("jax", cpu), *_alternative_cases("torch", cpu)]
        return [
            _speed("ceilings and attention", cases, 400),
            _speed("step auto", _step_cases("auto", cpu), 400),
        ]
    jobs = [_speed("ceilings", _ceiling_cases(cpu), 60), _speed("step auto", _step_cases("auto", cpu), 130)]
    jobs += [_speed(f"attention {name}", speed_cases(name, cpu=cpu), 90) for name in PALLAS]
    jobs += [_speed(f"attention {name} int8", quantised_speed_cases(name), 30) for name in PALLAS]
    jobs.append(_speed("attention cudnn", _alternative_cases("jax", cpu), 60))
    jobs.append(_speed("attention torch", _alternative_cases("torch", cpu), 50))
    jobs.append(_speed("attention xla", speed_cases("xla", cpu=cpu), 60))
    jobs.append(_speed("step xla", _step_cases("xla", cpu)[:1], 90))
    return jobs


def attention_cases(backend: str) -> list[Case]:
    """Correctness on a GPU: not every combination, but every value beside every neighbour that it could trip over."""
    base = {"group": 4, "kv_heads": 2, "head_dim": 128, "block_size": 16, "dtype": "bfloat16", "padding": 2}
    mixed = {"contexts": _CONTEXTS, "query_lens": _QUERY_LENS}
    cases: list[dict[str, Any]] = []

    def add(kind: str, **changes: Any) -> None:
        case = base | mixed | changes
        cases.append({"name": _name(backend, kind, case, base), "kind": kind, "backend": backend, **case})

    for dtype in ("bfloat16", "float32", "float16"):
        for head_dim in HEAD_DIMS:
            add("attention", dtype=dtype, head_dim=head_dim)
    for head_dim in (64, 128):
        for group in GROUPS:
            add("attention", group=group, head_dim=head_dim)
    add("attention", group=3, head_dim=96, dtype="float16")
    add("attention", group=7, head_dim=256)
    for block_size in (8, 32, 64, 128):
        add("attention", block_size=block_size)
    for window in (1, 100, 1000):
        add("attention", window=window)
    add("attention", window=130, group=3, head_dim=64)
    add("attention", cap=5.0)
    add("attention", cap=30.0, window=200, head_dim=256, dtype="float32")
    add("attention", cap=1.5, window=33, group=3, head_dim=64, dtype="float16")
    for kv_dtype in ("int8", "float8_e4m3fn", "float8_e5m2"):
        for scales in ("block", "head", "both"):
            add("attention", kv_dtype=kv_dtype, scales=scales)
        add("attention", kv_dtype=kv_dtype, scales="both", group=3, head_dim=64)
        add(
            "attention",
            kv_dtype=kv_dtype,
            scales="head",
            group=8,
            head_dim=256,
            block_size=32,
            dtype="float16",
        )
    for dtype in ("bfloat16", "float32"):
        for queries in (1, 37):
            lens = {"contexts": [1337, 600, 1, 90, 411], "query_lens": [queries, 1, 1, 1, 50]}
            add("alone", dtype=dtype, **lens)
            add("alone", dtype=dtype, group=3, head_dim=64, block_size=32, window=300, **lens)
    for group in (4, 7):
        lens = {"contexts": [*range(0, 1024, 16)], "query_lens": [1] * 64}
        add("decode", group=group, **lens)
    add("decode", contexts=[20000], query_lens=[1])
    return list({case["name"]: case for case in cases}.values())


def large_cache_cases(backend: str) -> list[Case]:
    """Caches beyond 2**31 numbers and beyond 2**32 bytes: where 32-bit offsets would wrap around."""
    shared = {"kind": "large_cache", "backend": backend, **EIGHT_B_ATTENTION, "batch": 8, "context": 3000}
    shared |= {"width": 256, "launches": 1}
    half = {"name": f"{backend}: cache of 2**32 bfloat16 numbers", "pool_tokens": 2**22}
    byte = {
        "name": f"{backend}: cache of 3 * 2**30 int8 numbers",
        "pool_tokens": 3 * 2**20,
        "kv_dtype": "int8",
    }
    return [shared | half, shared | byte]


def _few_cases(backend: str) -> list[Case]:
    """For the self-test of the logic, where kernels are interpreted."""
    base = {"group": 3, "kv_heads": 1, "head_dim": 64, "block_size": 16, "dtype": "bfloat16", "padding": 1}
    lens = {"contexts": [40, 0, 9], "query_lens": [1, 1, 5]}
    shared = {"kind": "attention", "backend": backend, **base, **lens}
    cases: list[Case] = [{"name": f"{backend}: a mixed batch", **shared}]
    if backend != "xla":
        cases.append({"name": f"{backend}: head_dim 320", **shared, "head_dim": 320})
    return cases


# Lengths around the edges of blocks, tiles and splits. Chunks that start at 0, inside a block and far out.
_CONTEXTS = [0, 16, 63, 127, 128, 511, 1500, 4099, 0, 5, 48, 700]
_QUERY_LENS = [1, 1, 1, 1, 1, 1, 1, 1, 33, 2, 70, 40]


def _name(backend: str, kind: str, case: Case, base: Case) -> str:
    shown = {"dtype": "bfloat16", "head_dim": 128, "group": 4, "block_size": 16} | dict(case)
    parts = [f"{shown['dtype']} d{shown['head_dim']} g{shown['group']} b{shown['block_size']}"]
    for key in ("window", "cap", "kv_dtype", "scales"):
        if key in case:
            parts.append(f"{key} {case[key]}")
    if kind != "attention":
        parts.append(f"{kind} {len(case['contexts'])}x{case['query_lens'][0]}")
    return f"{backend}: " + " ".join(parts)


def engine_cases(backend: str, *, cpu: bool) -> list[Case]:
    shared = {"kind": "engine", "backend": backend, "block_size": 16}
    if cpu:
        small = {"model": TINY, "max_model_len": 64, "max_num_seqs": 4, "token_sizes": [8]}
        sizes = small | {"prompt_lens": [9, 1], "max_tokens": 3}
    else:
        sizes = {"model": SMALL, "max_model_len": 1024, "max_num_seqs": 8, "token_sizes": [8, 96]}
        sizes |= {"prompt_lens": [1, 5, 17, 40, 130, 500], "max_tokens": 32}
    dtypes = ("float32",) if cpu else ("bfloat16", "float32")
    return [{"name": f"{backend}: engine {dtype}", **shared, **sizes, "dtype": dtype} for dtype in dtypes]


def _ceiling_cases(cpu: bool) -> list[Case]:
    return [
        {"name": "copy", "kind": "copy", "bytes": 2**20 if cpu else 2**31},
        {"name": "matmul", "kind": "matmul", "size": 128 if cpu else 8192},
    ]


def decode_shapes(cpu: bool) -> list[dict[str, Any]]:
    """The batches and contexts at which decode is timed, the target first."""
    if cpu:
        return [{"batch": 2, "context": 40, "launches": 1}]
    # Launches in one program: enough work to hide the host behind, and more than the L2 cache holds.
    launches = {1: 32, 16: 16, 64: 6, 256: 2}
    shapes = [(b, c) for b in (64, 16, 256, 1) for c in (8192, 1024, 32768) if b * c <= _POOL_TOKENS]
    return [{"batch": b, "context": c, "launches": launches[b]} for b, c in shapes]


def prefill_shapes(cpu: bool) -> list[dict[str, Any]]:
    """Chunks (and the context before them) at which prefill is timed; the target first."""
    if cpu:
        return [{"chunk": 8, "context": 0, "tokens": 16, "rows": 2, "launches": 1}]
    shared = {"tokens": 8192, "rows": 16, "launches": 2}
    return [{"chunk": n, "context": c, **shared} for n, c in ((2048, 0), (512, 0), (8192, 0), (2048, 6144))]


def speed_cases(backend: str, *, cpu: bool) -> list[Case]:
    """Our attention at every shape; the XLA backend, which is slow, only at some."""
    attention = EIGHT_B_ATTENTION if not cpu else EIGHT_B_ATTENTION | {"kv_heads": 1, "head_dim": 64}
    shared = {**attention, "backend": backend, "pool_tokens": 512 if cpu else _POOL_TOKENS}
    decode, prefill = decode_shapes(cpu), prefill_shapes(cpu)
    if backend == "xla" and not cpu:
        decode = [{**s, "launches": 1} for s in decode if s["batch"] in (1, 64) and s["context"] <= 8192]
        prefill = [{**s, "launches": 1} for s in prefill[:2]]
    cases: list[Case] = []
    for shape in decode:
        compare = backend != "xla" and (cpu or (shape["batch"], shape["context"]) == (16, 8192))
        name = f"{backend}: decode batch {shape['batch']} context {shape['context']}"
        extra = {"width": 4 if cpu else 2048, "compare": compare}
        cases.append({"name": name, "kind": "time_decode", **shared, **shape, **extra})
    for shape in prefill:
        compare = backend != "xla" and shape["chunk"] == 512
        name = f"{backend}: prefill chunks of {shape['chunk']} behind {shape['context']}"
        extra = {"width": 4 if cpu else 512, "compare": compare}
        cases.append({"name": name, "kind": "time_prefill", **shared, **shape, **extra})
    return cases


def quantised_speed_cases(backend: str) -> list[Case]:
    """Our attention over an int8 cache, at the two targets."""
    shared = {**EIGHT_B_ATTENTION, "backend": backend, "kv_dtype": "int8", "pool_tokens": _POOL_TOKENS}
    decode, prefill = decode_shapes(cpu=False)[0], prefill_shapes(cpu=False)[0]
    return [
        {"name": f"{backend}: decode over int8", "kind": "time_decode", **shared, **decode, "width": 2048},
        {"name": f"{backend}: prefill over int8", "kind": "time_prefill", **shared, **prefill, "width": 512},
    ]


def _alternative_cases(framework: str, cpu: bool) -> list[Case]:
    label = {"jax": "cudnn", "torch": "torch"}[framework]
    attention = EIGHT_B_ATTENTION if not cpu else EIGHT_B_ATTENTION | {"kv_heads": 1, "head_dim": 64}
    cases: list[Case] = []
    for shape in decode_shapes(cpu):
        # Keys and values of its own for each launch, as many as fit; few, since each copy of a call is compiled. Those
        # of the smallest shapes stay in the L2 cache, in these functions' favour.
        launches = max(1, min(shape["launches"], 8, _POOL_TOKENS // (shape["batch"] * shape["context"])))
        name = f"{label}: decode batch {shape['batch']} context {shape['context']}"
        kind = f"{framework}_decode"
        cases.append(
            {"name": name, "kind": kind, "backend": label, **attention, **shape, "launches": launches}
        )
    for shape in prefill_shapes(cpu):
        name = f"{label}: prefill chunks of {shape['chunk']} behind {shape['context']}"
        cases.append({"name": name, "kind": f"{framework}_prefill", "backend": label, **attention, **shape})
    return cases


def _step_cases(backend: str, cpu: bool) -> list[Case]:
    if cpu:
        sizes = {"model": TINY, "batch": 2, "max_model_len": 64, "dtype": "bfloat16"}
        contexts, tokens = [20], 4
    else:
        sizes = {"model": EIGHT_B, "batch": 64, "max_model_len": 8192, "dtype": "bfloat16"}
        contexts, tokens = [1024, 8192], 64
    shared = {"backend": backend, "block_size": 16, **sizes}
    cases: list[Case] = [
        {"name": f"{backend}: step at context {context}", "kind": "step", "context": context, **shared}
        for context in contexts
    ]
    gap = {"max_model_len": 64 if cpu else 1024, "max_tokens": tokens}
    cases.append({"name": f"{backend}: host gap", "kind": "host_gap", **shared, **gap})
    return cases


def _check(name: str, section: str, cases: Sequence[Case]) -> Job:
    return Job(name, section, cases, budget_s=200, stall_s=80, environment=_SHARED_MEMORY, is_check=True)


def _speed(name: str, cases: Sequence[Case], budget_s: float) -> Job:
    return Job(name, "speed", cases, budget_s=budget_s, stall_s=budget_s, environment=_ALL_MEMORY)
