"""scripts/aot_check: it understands what the tools print (recorded samples), its gates close, and kernels pass them.

Real compiles need an environment with JAX's CUDA plugin (1.1 GB), so they run only where there is one: the folder that
JAXSERVE_AOT_VENV names, or .venv-aot, which the first run of scripts/aot_check makes.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.bench import costs
from jaxserve.device.targets import TARGETS
from jaxserve.models.registry import get_family
from pallas_kernels.paged_attention import backend_names
from scripts.aot import cuda_tools, dumps, hlo, record, report, runner
from scripts.aot.cases import HEADS, KernelCase, StepCase, all_cases, kernel_cases, step_cases
from scripts.aot.dumps import Kernel
from scripts.aot.gates import failures
from scripts.aot.models import MODELS
from scripts.aot.results import Result, StepFacts

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENT = (REPOSITORY / "docs" / "kernels.md").read_text()
RECORD = REPOSITORY / "docs" / "results" / "aot-check.json"
SAMPLES = REPOSITORY / "tests" / "data" / "aot"
LAYER_KEYS = 4097 * 2 * 16 * 64  # numbers in each cache array of the recorded step


def sample(name: str) -> str:
    return (SAMPLES / name).read_text()


# What the tools print.


def test_ptxas_reports_spills() -> None:
    [found] = cuda_tools.parse_ptxas(sample("ptxas_spills.txt"))
    assert found == cuda_tools.Resources(
        "paged_prefill", registers=32, stack=8456, spill_stores=26408, spill_loads=41632, static_shared=0
    )


def test_ptxas_reports_static_shared_memory() -> None:
    [found] = cuda_tools.parse_ptxas(sample("ptxas_mosaic.txt"))
    assert (found.name, found.registers, found.static_shared) == ("body_mosaic_gpu_kernel", 168, 1)
    assert found.stack == found.spill_stores == found.spill_loads == 0


def test_ptxas_reports_every_function() -> None:
    both = cuda_tools.parse_ptxas(sample("ptxas_spills.txt") + sample("ptxas_mosaic.txt"))
    assert [found.registers for found in both] == [32, 168]
    assert [found.spill_loads for found in both] == [41632, 0]


def test_instructions_are_counted_with_and_without_predicates() -> None:
    counted = cuda_tools.count_instructions(sample("sass_excerpt.txt"))
    assert counted["HGMMA"] == 8
    assert counted["UTMALDG"] == 2, "both stand behind a uniform predicate"
    assert counted["SYNCS"] == 8
    assert counted["LDG"] == 1
    assert counted.total() == 40


def test_nothing_is_counted_in_other_text() -> None:
    assert not cuda_tools.count_instructions("code for sm_90a\n/* HGMMA */\n  HGMMA.64x64x16 R88\n")
    assert cuda_tools.parse_ptxas("ptxas fatal   : Unresolved extern function") == []


def test_shared_memory_of_a_mosaic_kernel_has_its_barriers_in_it() -> None:
    assert dumps.mosaic_shared_memory(sample("mosaic_resources.txt")) == 133_120 + 8 * (2 * 2 + 2 * 2)
    with pytest.raises(ValueError, match="not a dump"):
        dumps.mosaic_shared_memory("")


def test_shared_memory_of_a_triton_kernel_is_what_its_launch_asks_for() -> None:
    thunks = sample("thunk_sequence.txt")
    assert dumps.dynamic_shared_memory(thunks, "paged_decode") == 43_008
    assert dumps.dynamic_shared_memory(thunks, "paged_prefill") == 73_984
    with pytest.raises(ValueError, match="no launch of decode"):
        dumps.dynamic_shared_memory(thunks, "decode")


def test_pallas_kernels_are_told_from_those_of_xla() -> None:
    call = (
        '%a = f32[2]{0} custom-call(%b), custom_call_target="__gpu$xla.gpu.triton", '
        'backend_config={grid_x = 2, ir = "ML\\EF", name = "paged_decode", num_warps = 4 : i32}'
    )
    other = '%c = f32[2]{0} custom-call(%d), custom_call_target="__cublas$gemm", backend_config={name = "x"}'
    assert dumps.triton_names(f"{call}\n{other}\n{call}") == {"paged_decode"}
    assert hlo.is_pallas_call(call)
    assert hlo.is_pallas_call('custom-call(%b), custom_call_target="mosaic_gpu_v2", operand')
    assert not hlo.is_pallas_call(other)
    assert sum(map(hlo.is_pallas_call, sample("step_donated.hlo.txt").splitlines())) == 3


# Copies of a cache, in two real programs: the same step, its caches donated and not.


def test_a_step_that_owns_its_caches_copies_none() -> None:
    text = sample("step_donated.hlo.txt")
    assert hlo.aliased_outputs(text) == {0: 0, 1: 1}
    assert hlo.large_arrays_made(text, LAYER_KEYS) == []


def test_copies_of_caches_are_found() -> None:
    text = sample("step_kept.hlo.txt")
    assert hlo.aliased_outputs(text) == {}
    copies = hlo.large_arrays_made(text, LAYER_KEYS)
    assert len(copies) == 2
    assert all("copy(%cache" in line for line in copies)


@pytest.mark.parametrize("opcode", ["copy", "convert", "transpose", "select"])
def test_a_fusion_that_rebuilds_a_cache_is_found(opcode: str) -> None:
    text = sample("step_donated.hlo.txt")
    writes = [line for line in text.splitlines() if line.startswith("  ROOT %scatter") and "4097" in line]
    assert writes
    rebuilt = text.replace(writes[0], writes[0].replace(" scatter(", f" {opcode}("))
    assert hlo.large_arrays_made(rebuilt, LAYER_KEYS)


def test_a_fusion_of_several_writes_may_not_hide_a_copy() -> None:
    fused = """
%body (a: f32[8,4], b: f32[8,4], c: f32[2,4]) -> (f32[8,4], f32[8,4]) {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[8,4]{1,0} parameter(1)
  %c = f32[2,4]{1,0} parameter(2)
  %i = s32[] constant(0)
  %one = f32[8,4]{1,0} dynamic-update-slice(%a, %c, %i, %i)
  %two = f32[8,4]{1,0} OTHER(%b, %c, %i, %i)
  %seen = f32[8,4]{1,0} bitcast(%two)
  ROOT %both = (f32[8,4]{1,0}, f32[8,4]{1,0}) tuple(%one, %seen)
}

ENTRY %main (a: f32[8,4], b: f32[8,4], c: f32[2,4]) -> (f32[8,4], f32[8,4]) {
  %a = f32[8,4]{1,0} parameter(0)
  %b = f32[8,4]{1,0} parameter(1)
  %c = f32[2,4]{1,0} parameter(2)
  ROOT %f = (f32[8,4]{1,0}, /*index=1*/f32[8,4]{1,0}) fusion(%a, %b, %c), kind=kLoop, calls=%body
}
"""
    assert hlo.large_arrays_made(fused.replace("OTHER", "dynamic-update-slice"), 32) == []
    assert any("fusion" in line for line in hlo.large_arrays_made(fused.replace("OTHER", "add"), 32))
    assert hlo.large_arrays_made(fused.replace("OTHER", "add"), 33) == []


# Gates.

MOSAIC = KernelCase("h200", "pallas-mosaic-gpu", "llama3-8b")
TRITON = KernelCase("h200", "pallas-triton", "llama3-8b")
STEP = StepCase("h200", "pallas-triton", "llama3.1-8b", 64, 64, 8192)
GOOD = Kernel("paged_decode", 168, 0, 0, 0, 232_448, {"HGMMA": 12, "UTMALDG": 8})
FACTS = StepFacts(
    arguments=85_000_000_000,
    temporaries=100_000_000,
    aliased=69_000_000_000,
    state=69_000_000_000,
    caches=68_000_000_000,
    layer_keys=1_000_000_000,
    copies=[],
    attention_calls=64,
)


def compiled(case: KernelCase | StepCase, *kernels: Kernel, step: StepFacts | None = None) -> Result:
    return Result(case, "compiled", kernels=list(kernels), step=step)


def test_good_results_pass() -> None:
    assert failures(compiled(MOSAIC, GOOD)) == []
    assert failures(compiled(TRITON, dataclasses.replace(GOOD, instructions={"HMMA": 1}))) == []
    assert failures(compiled(STEP, GOOD, step=FACTS)) == []
    assert failures(Result(dataclasses.replace(MOSAIC, may_refuse=True), "refused", "head_dim")) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"spill_stores": 4}, "spills registers: 4 bytes stored, 0 bytes loaded"),
        ({"spill_loads": 4}, "spills registers: 0 bytes stored, 4 bytes loaded"),
        ({"shared_memory": 232_449}, "232449 bytes of shared memory, the limit is 232448"),
        ({"instructions": {"UTMALDG": 8}}, "no HGMMA in its code"),
        ({"instructions": {"HGMMA": 8, "HMMA": 8}}, "no UTMALDG in its code"),
    ],
)
def test_a_bad_kernel_fails_with_one_line_that_names_it(change: dict, says: str) -> None:
    [line] = failures(compiled(MOSAIC, GOOD, dataclasses.replace(GOOD, name="bad", **change)))
    assert line.startswith(f"{MOSAIC.name}: bad: ")
    assert says in line


def test_each_device_has_its_own_limit_of_shared_memory() -> None:
    on_a100 = dataclasses.replace(TRITON, target="a100")
    assert failures(compiled(TRITON, dataclasses.replace(GOOD, shared_memory=166_913))) == []
    assert failures(compiled(on_a100, dataclasses.replace(GOOD, shared_memory=166_913)))
    assert failures(compiled(on_a100, dataclasses.replace(GOOD, shared_memory=166_912))) == []


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"copies": ["%copy.1 = bf16[9]"]}, "as large as a layer's keys: %copy.1"),
        ({"aliased": 68_999_999_999}, "68999999999 bytes are aliased"),
        ({"temporaries": 1_000_000_000}, "1000000000 bytes of temporaries"),
        ({"arguments": 151_400_000_000}, "the device has 151397597184"),
        ({"attention_calls": 0}, "launches no Pallas kernel"),
    ],
)
def test_a_bad_step_fails(change: dict, says: str) -> None:
    [line] = failures(compiled(STEP, GOOD, step=dataclasses.replace(FACTS, **change)))
    assert says in line


def test_what_was_not_compiled_fails() -> None:
    assert failures(Result(MOSAIC, "refused", "head_dim 96")) == [f"{MOSAIC.name}: refused: head_dim 96"]
    may_refuse = dataclasses.replace(MOSAIC, may_refuse=True)
    assert failures(Result(may_refuse, "failed", "SIGABRT: F0101")) == [f"{MOSAIC.name}: SIGABRT: F0101"]
    assert failures(compiled(MOSAIC)) == [f"{MOSAIC.name}: no Pallas kernel in the program"]


# Processes.


def test_a_process_that_dies_is_a_result() -> None:
    unknown = dataclasses.replace(TRITON, backend="no-such-backend")
    result = runner.run_one(unknown)
    assert result.outcome == "failed"
    assert result.detail.startswith("exit code 1: ValueError: ")
    assert failures(result)


def test_the_end_of_a_process_is_told_in_one_line() -> None:
    aborted = "INFO x\nF1130 02:03:04 cuda.cc:12] Check failed: too much shared memory\n\n*** SIGABRT ***\n"
    assert runner.describe_end(-6, aborted) == (
        "SIGABRT: F1130 02:03:04 cuda.cc:12] Check failed: too much shared memory"
    )
    raised = "Traceback ...\nValueError: no\n----\nFor simplicity, JAX has removed its internal frames\n"
    assert runner.describe_end(1, raised) == "exit code 1: ValueError: no"
    assert runner.describe_end(-9, "") == "SIGKILL: nothing printed"


@pytest.mark.parametrize(
    "result",
    [compiled(MOSAIC, GOOD), compiled(STEP, GOOD, step=FACTS), Result(TRITON, "refused", "no")],
    ids=["kernel", "step", "refused"],
)
def test_results_survive_json(result: Result) -> None:
    assert Result.from_json(json.loads(json.dumps(result.as_json()))) == result


# Cases, costs, document.


def test_cases_cover_what_the_kernels_promise() -> None:
    cases = kernel_cases()
    names = [case.name for case in (*cases, *step_cases())]
    assert len(set(names)) == len(names)
    for backend in ("pallas-mosaic-gpu", "pallas-triton"):
        assert backend in backend_names()
        ours = [case for case in cases if (case.target, case.backend) == ("h200", backend)]
        required = [case for case in ours if not case.may_refuse]
        heads = [HEADS[case.model] for case in required]
        assert {h.num_heads // h.num_kv_heads for h in heads} >= {1, 2, 3, 4, 7, 16}
        assert {h.head_dim for h in heads} >= {64, 96, 128, 256}
        assert {case.block_size for case in required} >= {16, 128}
        assert {case.dtype for case in required} >= {"bfloat16", "float16"}
        assert {case.kv_dtype for case in ours} >= {"int8", "float8_e4m3fn", "float8_e5m2"}
        assert "mosaic" in backend or not any(case.may_refuse for case in ours)
        assert {case.function for case in required} == {"ragged", "decode"}
        assert {case.model for case in step_cases() if case.backend == backend} == set(MODELS)
    assert any(case.target == "a100" for case in cases)


def test_every_target_describes_itself_as_its_facts_say() -> None:
    for target in TARGETS.values():
        assert f"core_count: {target.facts.num_sms}\n" in target.config
        assert f"shared_memory_per_block_optin: {target.shared_memory}\n" in target.config
        assert f"device_memory_size: {target.memory}\n" in target.config


LLAMA = MODELS["llama3.1-8b"]


def test_decode_attention_reads_each_key_and_value_once() -> None:
    cost = costs.decode_attention(LLAMA, batch=64, context=8192, block_size=16)
    assert cost.kv_bytes == 2 * 2**30
    assert cost.q_out_bytes == 2 * np.zeros((64, 32, 128), np.float16).nbytes
    assert cost.table_bytes == np.zeros((64, 512), np.int32).nbytes
    assert cost.bytes == cost.kv_bytes + cost.q_out_bytes + cost.table_bytes
    # A product of a row with every key, and one of the weights with every value.
    assert cost.flops == 64 * 32 * (2 * 8192 * 128 + 2 * 8192 * 128)
    assert costs.decode_attention(LLAMA, batch=64, context=8192, block_size=16, itemsize=1).kv_bytes == 2**30


@pytest.mark.parametrize(("chunk", "context"), [(1, 0), (5, 0), (5, 7), (64, 100)])
def test_prefill_operations_are_those_of_visible_pairs(chunk: int, context: int) -> None:
    visible = np.arange(context + chunk)[None] <= context + np.arange(chunk)[:, None]
    assert costs.prefill_flops(LLAMA, chunk=chunk, context=context) == 2 * 2 * 32 * 128 * int(visible.sum())


@pytest.mark.parametrize("name", MODELS)
def test_a_step_reads_each_weight_once(name: str) -> None:
    model = MODELS[name]
    build = get_family(model.architecture).build
    module = nnx.eval_shape(lambda: build(model, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    total = sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(module)))
    assert total == {"llama3.1-8b": 8_030_261_248, "smollm2-135m": 134_515_008}[name]
    cost = costs.decode_step(model, batch=64, context=8192)
    unread = 0 if model.tie_word_embeddings else (model.vocab_size - 64) * model.hidden_size
    assert cost.weight_bytes == 2 * (total - unread)
    one = costs.decode_attention(model, batch=64, context=8192, block_size=16)
    assert cost.kv_read_bytes == model.num_layers * one.kv_bytes
    assert cost.kv_write_bytes * 8192 == cost.kv_read_bytes
    parts = cost.weight_bytes + cost.kv_read_bytes + cost.kv_write_bytes + cost.logit_bytes
    assert cost.bytes == parts


def test_tables_are_put_between_their_markers() -> None:
    text = "a\n<!-- x:begin (made by y) -->\nold\n<!-- x:end -->\nb\n"
    new = report.replace_between(text, "x", "new\n")
    assert new == "a\n<!-- x:begin (made by y) -->\nnew\n<!-- x:end -->\nb\n"
    assert report.replace_between(new, "x", "new") == new
    with pytest.raises(ValueError, match="no markers"):
        report.replace_between("nothing", "x", "new")


def test_the_document_shows_what_was_recorded_and_computed() -> None:
    """If this fails: scripts/aot_check --write-docs, with --only for the cases that changed."""
    assert report.write_tables(DOCUMENT, record.read(RECORD)) == DOCUMENT
    assert all(report.row_start(case) in DOCUMENT for case in all_cases())


def test_a_run_adds_to_the_record(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    assert {result.outcome for result in record.read(path)} == {"not run"}
    first, second, *_ = all_cases()
    record.add(path, [Result(first, "failed", "one"), Result(second, "refused", "two")])
    gone = dataclasses.replace(TRITON, model="no such model")
    after = record.add(path, [Result(second, "compiled", kernels=[GOOD]), Result(gone, "compiled")])
    assert after == record.read(path)
    assert [result.case for result in after] == all_cases()
    assert after[:2] == [Result(first, "failed", "one"), Result(second, "compiled", kernels=[GOOD])]
    assert {result.outcome for result in after[2:]} == {"not run"}


# Real compiles.


@pytest.fixture(scope="module")
def aot_check() -> Callable[..., subprocess.CompletedProcess[str]]:
    named = os.environ.get("JAXSERVE_AOT_VENV")
    place = Path(named) if named else REPOSITORY / ".venv-aot"
    if not named and not (place / "bin" / "python").exists():
        pytest.skip(
            "nothing was compiled for a GPU: no .venv-aot in this checkout and JAXSERVE_AOT_VENV is not set. "
            "Running scripts/aot_check once makes the environment (1.1 GB of wheels)"
        )

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [str(REPOSITORY / "scripts" / "aot_check"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=1200, cwd="/")

    return run


@pytest.mark.parametrize(
    "case",
    [
        "h200/pallas-mosaic-gpu/llama3-8b/bfloat16/b16/ragged",
        "h200/pallas-triton/smollm2-135m/bfloat16/b16/ragged",
        "a100/pallas-triton/llama3-8b/bfloat16/b16/ragged",
    ],
)
def test_kernels_compile_for_a_gpu(
    aot_check: Callable[..., subprocess.CompletedProcess[str]], case: str, tmp_path: Path
) -> None:
    done = aot_check("--only", case, "--json", str(tmp_path / "result.json"))
    assert done.returncode == 0, done.stdout + done.stderr
    [result] = [Result.from_json(data) for data in json.loads((tmp_path / "result.json").read_text())]
    assert result.case.name == case
    assert len(result.kernels) >= 2, "a decode kernel and a prefill kernel"
    products = "HGMMA" if "mosaic" in case else "HMMA"
    assert sum(kernel.shared_memory > 0 for kernel in result.kernels) >= 2
    assert any(kernel.instructions.get(products) for kernel in result.kernels)


def test_bad_arguments_are_refused(aot_check: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    nothing = aot_check("--only", "no such case")
    assert (nothing.returncode, nothing.stdout) == (2, "")
    assert "no case has no such case in its name" in nothing.stderr
