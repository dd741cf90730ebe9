"""The GPU kernels' code behind the real server, interpreted on a CPU: the tokens are those of the XLA path."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.outputs import TokenLogprobs
from tests.server import http
from tests.server_process import ServerProcess
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.usefixtures("quick_to_compile")

LIMITS = {"max_num_seqs": 2, "max_num_batched_tokens": 8, "max_model_len": 96}
PROMPTS = [list(range(300, 340)), [7, 8, 9]]
NUM_TOKENS = 5
NEAR_TIE = {"float32": 1e-4, "bfloat16": 5e-2}  # between the two best logprobs


@pytest.fixture(scope="module")
def model_dir(demo_checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 64, as the kernels want them; three of them share a KV head."""
    return write_tiny_model(
        tmp_path_factory.mktemp("kernels") / "tiny",
        demo_checkpoint_dir,
        head_dim=64,
        num_attention_heads=3,
        num_key_value_heads=1,
        num_hidden_layers=1,
        eos_token_id=49151,
    )


@pytest.mark.parametrize(
    ("flag", "dtype", "runs"),
    [
        ("pallas-interpret", "bfloat16", "pallas-mosaic-gpu"),
        ("pallas-triton-interpret", "float32", "pallas-triton"),
    ],
)
def test_a_kernel_serves(flag: str, dtype: str, runs: str, model_dir: Path) -> None:
    limits = [part for name, value in LIMITS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    flags = ("--served-model-name", "tiny", "--dtype", dtype, "--attention-backend", flag, *limits)
    body = {"model": "tiny", "temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
    body |= {"logprobs": 0, "return_token_ids": True}
    with ServerProcess(model_dir, *flags) as server, ThreadPoolExecutor() as pool:
        ask = lambda prompt: http.post(server.base_url, "/v1/completions", {**body, "prompt": prompt})  # noqa: E731
        replies = list(pool.map(ask, PROMPTS))
        metrics = http.request(server.base_url, "GET", "/metrics").body.decode()
    for reply, expected in zip(replies, on_the_xla_path(dtype, model_dir), strict=True):
        assert reply.status == 200, reply.body
        choice = reply.json["choices"][0]
        assert_same(choice["token_ids"], choice["logprobs"]["token_logprobs"], expected, NEAR_TIE[dtype])
    assert f"attention backend: {runs}-interpret," in server.logs
    if runs == "pallas-triton":  # Mosaic's interpreter compiles small programs of its own while it runs
        assert 'jaxserve:serving_compilations_total{model_name="tiny"} 0.0' in metrics


def on_the_xla_path(dtype: str, model_dir: Path) -> list[list[TokenLogprobs]]:
    """For each prompt, what every token was and which were the two best."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, logprobs=2, ignore_eos=True)
    with LLM(str(model_dir), dtype=dtype, attention_backend="xla", **LIMITS) as llm:
        return [completion.choices[0].logprobs for completion in llm.generate(PROMPTS, params)]


def assert_same(
    token_ids: list[int], logprobs: list[float], expected: list[TokenLogprobs], near_tie: float
) -> None:
    """Equal tokens; the first that differs, if any, must be a near-tie, and ends the comparison."""
    assert len(token_ids) == NUM_TOKENS
    for token_id, logprob, entry in zip(token_ids, logprobs, expected, strict=True):
        if token_id != entry.token_id:
            (_, best), (_, second) = entry.top
            assert best - second < near_tie, f"{token_id} for {entry}"
            return
        assert abs(logprob - entry.logprob) < near_tie
