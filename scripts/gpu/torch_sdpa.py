"""The alternative outside of JAX: PyTorch's scaled_dot_product_attention on contiguous keys and values.

Its worker process never imports jax; where PyTorch is missing its cases are left out.
"""

from __future__ import annotations

from typing import Any

from scripts.gpu.jobs import Case
from scripts.gpu.measure import median_seconds
from scripts.gpu.workplace import Workplace


def time_decode(case: Case, place: Workplace) -> dict[str, Any]:
    """See `jax_sdpa.time_decode`."""
    import torch

    batch, context, launches = case["batch"], case["context"], case["launches"]
    q = _random(batch, case["kv_heads"] * case["group"], 1, case)
    pairs = [
        (_random(batch, case["kv_heads"], context, case), _random(batch, case["kv_heads"], context, case))
        for _ in range(launches)
    ]

    def call() -> torch.Tensor:
        out = q
        for k, v in pairs:
            out = torch.nn.functional.scaled_dot_product_attention(out, k, v, enable_gqa=True)
        return out

    taken = median_seconds(call, _wait, launches=launches)
    nbytes = sum(x.nbytes for x in pairs[0])
    return {**taken, "bytes": nbytes, "bytes_per_s": nbytes / taken["seconds"]}


def time_prefill(case: Case, place: Workplace) -> dict[str, Any]:
    """See `jax_sdpa.time_prefill`."""
    import torch

    if case["context"]:
        raise NotImplementedError("is_causal starts at the first key: no chunk behind a context")
    batch, chunk = case["tokens"] // case["chunk"], case["chunk"]
    num_heads = case["kv_heads"] * case["group"]
    q = _random(batch, num_heads, chunk, case)
    k, v = (_random(batch, case["kv_heads"], chunk, case) for _ in range(2))

    def call() -> torch.Tensor:
        out = q
        for _ in range(case["launches"]):
            out = torch.nn.functional.scaled_dot_product_attention(out, k, v, is_causal=True, enable_gqa=True)
        return out

    taken = median_seconds(call, _wait, launches=case["launches"])
    flops = batch * (chunk * (chunk + 1) // 2) * 4 * num_heads * case["head_dim"]
    return {**taken, "flops": flops, "flops_per_s": flops / taken["seconds"]}


def _random(batch: int, heads: int, tokens: int, case: Case) -> Any:
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = (batch, heads, tokens, case["head_dim"])
    return torch.randn(shape, device=device, dtype=getattr(torch, case["dtype"]))


def _wait(result: Any) -> None:
    import torch

    if result.is_cuda:
        torch.cuda.synchronize()
