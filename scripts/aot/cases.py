"""What is compiled: every shape class that matters, for each backend and target."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Heads:
    """The attention shape of a model: query heads, KV heads, head size."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


HEADS = {
    "llama3-8b": Heads(32, 8, 128),
    "smollm2-135m": Heads(9, 3, 64),
    "qwen2.5-0.5b": Heads(14, 2, 64),
    "gemma2-9b": Heads(16, 8, 256),
    "llama2-7b": Heads(32, 32, 128),
    "glm4-9b": Heads(32, 2, 128),
    "phi3-mini": Heads(32, 32, 96),
}


@dataclass(frozen=True)
class KernelCase:
    """One call of the attention interface.

    Attributes:
      target, backend, model: names in `targets.TARGETS`, of a Pallas backend, in `HEADS`.
      function: "ragged" (which launches a decode and a prefill kernel) or "decode".
      windowed: with Gemma 2's sliding window and soft-cap.
      may_refuse: the backend may say that it does not support this.
    """

    target: str
    backend: str
    model: str
    block_size: int = 16
    dtype: str = "bfloat16"
    kv_dtype: str = "bfloat16"
    function: str = "ragged"
    windowed: bool = False
    may_refuse: bool = False

    @property
    def name(self) -> str:
        kv = self.dtype if self.kv_dtype == self.dtype else f"{self.dtype}+{self.kv_dtype}"
        window = "-window" if self.windowed else ""
        return f"{self.target}/{self.backend}/{self.model}/{kv}/b{self.block_size}/{self.function}{window}"


@dataclass(frozen=True)
class StepCase:
    """One bucket of a model's whole `serve_step`.

    Attributes:
      model: a name in `models.MODELS`.
      tokens, seqs: of the bucket; blocks have 16 tokens, sequences room for `context`.
    """

    target: str
    backend: str
    model: str
    tokens: int
    seqs: int
    context: int

    @property
    def name(self) -> str:
        return f"{self.target}/{self.backend}/{self.model}/serve_step/T{self.tokens}xS{self.seqs}"


def kernel_cases() -> list[KernelCase]:
    """Every kernel case, in the order in which the table lists them."""
    hopper = [case for backend in ("pallas-mosaic-gpu", "pallas-triton") for case in _on_hopper(backend)]
    return [*hopper, *_on_ampere()]


def _on_hopper(backend: str) -> Iterator[KernelCase]:
    where = ("h200", backend)
    for model in HEADS:
        for block_size in (16, 128):
            yield KernelCase(*where, model, block_size)
    yield KernelCase(*where, "gemma2-9b", windowed=True)
    # What Mosaic does not take goes to Triton.
    is_mosaic = backend == "pallas-mosaic-gpu"
    for model in ("llama3-8b", "smollm2-135m", "gemma2-9b"):
        yield KernelCase(*where, model, function="decode")
        yield KernelCase(*where, model, dtype="float16", kv_dtype="float16")
        large = is_mosaic and HEADS[model].head_dim > 128
        yield KernelCase(*where, model, kv_dtype="int8", may_refuse=large)
        yield KernelCase(*where, model, kv_dtype="float8_e4m3fn", may_refuse=large)
        yield KernelCase(*where, model, dtype="float32", kv_dtype="float32", may_refuse=is_mosaic)
    yield KernelCase(*where, "phi3-mini", kv_dtype="int8")
    yield KernelCase(*where, "llama3-8b", kv_dtype="int8", windowed=True)
    yield KernelCase(*where, "llama3-8b", kv_dtype="float8_e4m3fn", windowed=True)
    yield KernelCase(*where, "llama3-8b", kv_dtype="float8_e5m2")
    yield KernelCase(*where, "llama3-8b", 128, kv_dtype="int8")
    yield KernelCase(*where, "llama3-8b", 128, kv_dtype="float8_e4m3fn")
    yield KernelCase(*where, "llama3-8b", dtype="float16", kv_dtype="int8")


def _on_ampere() -> Iterator[KernelCase]:
    where = ("a100", "pallas-triton")
    for model in HEADS:
        yield KernelCase(*where, model)
    yield KernelCase(*where, "gemma2-9b", windowed=True)
    yield KernelCase(*where, "llama3-8b", 128)
    yield KernelCase(*where, "llama3-8b", dtype="float16", kv_dtype="float16")
    yield KernelCase(*where, "llama3-8b", dtype="float32", kv_dtype="float32")
    yield KernelCase(*where, "llama3-8b", kv_dtype="int8")
    # Conversions of fp8 came with compute capability 8.9.
    yield KernelCase(*where, "llama3-8b", kv_dtype="float8_e4m3fn", may_refuse=True)


def step_cases() -> list[StepCase]:
    """A decode bucket and a prefill bucket of each model, for each backend."""
    return [
        StepCase("h200", backend, model, tokens, 64, 8192)
        for model in ("llama3.1-8b", "smollm2-135m")
        for backend in ("pallas-mosaic-gpu", "pallas-triton")
        for tokens in (64, 2048)
    ]


def all_cases() -> list[KernelCase | StepCase]:
    """Kernels, then steps."""
    return [*kernel_cases(), *step_cases()]
