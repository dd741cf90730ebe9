"""`jaxserve compile`, and starts that find what it has made; real processes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jaxserve.cli.main import run
from tests.cli.command import run_jaxserve
from tests.server import http
from tests.server_process import ServerProcess

LIMITS = ("--max-num-seqs", "2", "--max-num-batched-tokens", "16", "--max-model-len", "128")
SUMMARY = re.compile(r"(\d+) programs, (\d+) of them compiled now, [\d.]+ MiB: (\S+)\n")


def gauge(url: str, name: str) -> float:
    found = re.search(
        rf"^jaxserve:{name}{{.*}} (\S+)$", http.request(url, "GET", "/metrics").body.decode(), re.MULTILINE
    )
    assert found is not None
    return float(found[1])


def test_a_start_compiles_nothing_of_what_was_compiled_before(
    tiny_checkpoint_dir: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    shapes = [{"tokens": tokens, "seqs": [2]} for tokens in (2, 8, 16)]
    plan.write_text(json.dumps({"jaxserve_bucket_plan": 1, "shapes": shapes}))
    flags = (*LIMITS, "--bucket-plan", str(plan))
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}

    def compile_all(*more: str) -> tuple[int, int, Path, str]:
        result = run_jaxserve("compile", tiny_checkpoint_dir, *flags, *more, environment=environment)
        assert result.returncode == 0, result.stderr
        summary = SUMMARY.fullmatch(result.stdout)
        assert summary is not None, result.stdout
        return int(summary[1]), int(summary[2]), Path(summary[3]), result.stderr

    old = tmp_path / "cache/jaxserve/executables" / ("0" * 32)
    old.mkdir(parents=True, mode=0o700)
    old.parent.chmod(0o700)
    (old / "manifest.json").write_text('{"jax": "0.1"}')
    (old / "x.bin").write_bytes(bytes(100))
    total, compiled, folder, log = compile_all("--program-cache-bytes", "0")
    assert total == compiled == len(list(folder.glob("*.bin"))) > 6
    assert "compiling again: another model, jax 0.1 -> " in log
    assert re.search(r"Compiling: (\d+)/\1 in", log), "progress was shown"
    assert folder.parent == old.parent
    assert not old.exists(), "there was no room for it"
    with ServerProcess(tiny_checkpoint_dir, *flags, "--wait-for-programs", environment=environment) as server:
        url = server.base_url
        model = http.request(url, "GET", "/v1/models").json["data"][0]["id"]
        body = {"model": model, "prompt": "Once", "max_tokens": 5, "ignore_eos": True}
        assert http.post(url, "/v1/completions", body).json["usage"]["completion_tokens"] == 5
        assert gauge(url, "compilations_total") == 0
        assert gauge(url, "serving_compilations_total") == 0
        assert gauge(url, "shapes_ready") == 3
    assert "again" not in server.logs, server.logs

    # What is damaged or gone is made again, and only that.
    (folder / "load_row.bin").write_bytes(b"damaged")
    (folder / "copy_blocks.bin").unlink()
    again = compile_all()
    assert again[:3] == (total, 2, folder)


@pytest.mark.parametrize(
    ("arguments", "mention"),
    [
        (("--target", "h200"), "--output"),
        (("--target", "h200", "--output", "x"), "--num-blocks"),
        (("--target", "h300", "--output", "x"), "h300"),
        (("--output", "x"), "no-such-model"),
        (("--bucket-plan", "missing.json"), "missing.json"),
    ],
)
def test_what_cannot_be_compiled_is_refused_in_one_line(
    arguments: tuple[str, ...], mention: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["compile", "no-such-model", *arguments]) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert mention in printed.err


def test_what_is_kept_is_listed_and_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    manifest = {
        "model": {"architecture": "LlamaForCausalLM", "num_layers": 7, "hidden_size": 48},
        "device": {"kind": "cpu"},
        "dtype": "float32",
        "quantization": "int8",
        "deterministic": True,
        "max_num_seqs": 4,
        "num_blocks": 9,
        "block_size": 16,
        "jax": "0.1",
    }
    texts = (json.dumps(manifest), "{}", "no JSON", None)
    for number, text in enumerate(texts):
        folder = tmp_path / f"{number:032x}"
        folder.mkdir()
        (folder / "p.bin").write_bytes(bytes(2**20))
        if text is not None:
            (folder / "manifest.json").write_text(text)
    (tmp_path / "notes.txt").write_text("not ours")

    def output(option: str) -> list[str]:
        assert run(["compile", option, "--output", str(tmp_path)]) == 0
        return capsys.readouterr().out.splitlines()

    *lines, total = output("--list")
    assert total == f"4 sets of programs, 4.0 MiB: {tmp_path}"
    assert [("no manifest that can be read" in line) for line in lines].count(True) == 3
    [line] = [line for line in lines if "7 layers" in line]
    assert "float32 + int8, deterministic, 4 sequences, 9 blocks of 16, cpu, jax 0.1" in line
    assert output("--clean") == [f"removed 4 of 4 sets of programs, 4.0 MiB: {tmp_path}"]
    assert {path.name for path in tmp_path.iterdir()} <= {"notes.txt", "lock"}
    assert output("--list") == [f"0 sets of programs, 0.0 MiB: {tmp_path}"]


@pytest.mark.parametrize("arguments", [[], ["--list", "--clean"], ["smollm2", "--list"], ["m", "--clean"]])
def test_listing_and_removing_stand_alone(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compile", *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
