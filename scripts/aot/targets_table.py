"""The byte and operation counts behind the targets on a GPU, as Markdown."""

from __future__ import annotations

from jaxserve.bench.costs import decode_attention, decode_step, prefill_flops
from scripts.aot.models import MODELS

_MODEL = "llama3.1-8b"
_BATCH, _CONTEXT, _BLOCK, _CHUNK = 64, 8192, 16, 2048
# Of an H200's data sheet: bytes a second, and dense bfloat16 operations a second. Targets compare with a copy and a
# matrix product that are measured on the device; these only give an idea of the times.
_BANDWIDTH, _PEAK = 4.8e12, 989e12


def targets_table() -> str:
    """One row for each count."""
    model = MODELS[_MODEL]
    attention = decode_attention(model, batch=_BATCH, context=_CONTEXT, block_size=_BLOCK)
    step = decode_step(model, batch=_BATCH, context=_CONTEXT)
    where = f"batch {_BATCH}, context {_CONTEXT:,}"
    rows = [
        ("decode attention of a layer", f"{where}, block {_BLOCK}: keys and values", attention.kv_bytes, 0),
        ("", "queries and results", attention.q_out_bytes, 0),
        ("", "block tables", attention.table_bytes, 0),
        ("", "**together**", attention.bytes, attention.flops),
        *(
            (
                "prefill attention of a layer",
                f"a chunk of {_CHUNK:,} tokens behind {context:,}",
                0,
                prefill_flops(model, chunk=_CHUNK, context=context),
            )
            for context in (0, _CHUNK, 3 * _CHUNK)
        ),
        ("whole decode step", f"{where}: weights", step.weight_bytes, 0),
        ("", "keys and values read", step.kv_read_bytes, 0),
        ("", "keys and values written", step.kv_write_bytes, 0),
        ("", "logits", step.logit_bytes, 0),
        ("", "**together**", step.bytes, 0),
    ]
    lines = ["| what | of what | bytes | FLOP | at the data sheet's rate |", "|---|---|---|---|---|"]
    for what, of_what, num_bytes, flops in rows:
        seconds = max(num_bytes / _BANDWIDTH, flops / _PEAK)
        counts = " | ".join(f"{count:,}" if count else "" for count in (num_bytes, flops))
        lines.append(f"| {what} | {of_what} | {counts} | {_time(seconds)} |")
    return "\n".join(lines)


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} µs"
