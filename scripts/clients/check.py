"""Other people's clients against a running server: lm-eval, LiteLLM, LangChain's OpenAI client, openai, anthropic.

Runs in an environment of its own, see scripts/check_clients. Imports nothing of jaxserve. Prints what each gave, and
exits with code 1 if one failed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path

TASKS = Path(__file__).resolve().parent / "tasks"
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]


def lm_eval(url: str, model: str, tokenizer: Path) -> str:
    """Both kinds of tasks; what it gets by loglikelihood must be more than chance."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    os.chdir(TASKS)  # where the tasks' own files are
    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": model,
            "base_url": f"{url}/v1/completions",
            "tokenizer_backend": "huggingface",
            "tokenizer": str(tokenizer),
            "num_concurrent": 4,
            "max_retries": 1,
            "max_length": 1024,
        },
        tasks=["facts", "capitals"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
    )
    facts = results["results"]["facts"]["acc,none"]
    capitals = results["results"]["capitals"]["exact_match,word"]
    assert facts > 0.5, f"accuracy {facts}, chance is 0.33"
    assert capitals > 0.2, f"{capitals} of the capitals"
    return f"facts: accuracy {facts:.2f} (chance 0.33); capitals: exact match {capitals:.2f}"


def litellm(url: str, model: str, tokenizer: Path) -> str:
    import litellm as client

    options = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none"}
    whole = client.completion(**options, messages=QUESTION, temperature=0, max_tokens=12)
    text = whole.choices[0].message.content
    chunks = client.completion(**options, messages=QUESTION, temperature=0, max_tokens=12, stream=True)
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text
    assert text == streamed
    vectors = client.embedding(**options, input=["one", "two"]).data
    assert len(vectors) == 2
    return f"chat {text!r}, the same streamed; embeddings of {len(vectors[0]['embedding'])} numbers"


def langchain(url: str, model: str, tokenizer: Path) -> str:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    chat = ChatOpenAI(model=model, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=12)
    text = chat.invoke(QUESTION).content
    streamed = "".join(chunk.content for chunk in chat.stream(QUESTION))
    assert text
    assert text == streamed
    # Without tiktoken, which would cut texts by OpenAI's tokens.
    embed = OpenAIEmbeddings(
        model=model, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    vectors = embed.embed_documents(["A cat sits.", "A kitten sits.", "Stock prices fell."])
    alike, other = (sum(a * b for a, b in zip(vectors[0], v, strict=True)) for v in vectors[1:])
    assert alike > other, (alike, other)
    return f"chat {text!r}, the same streamed; embeddings: cat and kitten {alike:.3f}, cat and stocks {other:.3f}"


def openai(url: str, model: str, tokenizer: Path) -> str:
    from openai import OpenAI

    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    chat = client.chat.completions.create(model=model, messages=QUESTION, temperature=0, max_tokens=12)
    response = client.responses.create(model=model, input=QUESTION, temperature=0, max_output_tokens=12)
    assert chat.choices[0].message.content == response.output_text
    vector = client.embeddings.create(model=model, input="one").data[0].embedding
    return f"chat and responses {response.output_text!r}; an embedding of {len(vector)} numbers"


def anthropic(url: str, model: str, tokenizer: Path) -> str:
    from anthropic import Anthropic

    client = Anthropic(base_url=url, api_key="none")
    # Its newer versions have no argument for the temperature.
    options = {"model": model, "messages": QUESTION, "max_tokens": 12, "extra_body": {"temperature": 0}}
    text = client.messages.create(**options).content[0].text
    with client.messages.stream(**options) as stream:
        streamed = stream.get_final_text()
    assert text
    assert text == streamed
    return f"messages {text!r}, the same streamed"


CLIENTS: dict[str, Callable[[str, str, Path], str]] = {
    "lm-eval": lm_eval,
    "litellm": litellm,
    "langchain-openai": langchain,
    "openai": openai,
    "anthropic": anthropic,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="of the server, without /v1")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of the model's tokenizer files")
    arguments = parser.parse_args()
    os.environ.setdefault("HF_DATASETS_CACHE", tempfile.mkdtemp())
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    lines, failed = [], 0
    for name, check in CLIENTS.items():
        try:
            found = check(arguments.url, arguments.model, arguments.tokenizer)
        except Exception as error:
            traceback.print_exc()
            failed += 1
            found = f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
        lines.append(f"{name} {importlib.metadata.version(name)}: {found}")
    print("\n".join(lines))
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
