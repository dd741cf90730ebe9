"""A tokenizer from the files that Hugging Face puts beside a model, and back to such files."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.checkpoint.json_file import read_json_object, read_optional_json_object
from jaxserve.checkpoint.tokenizer_parts import TokenizerParts
from jaxserve.errors import CheckpointError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

# Any one of these is enough for transformers to make a fast tokenizer.
_SLOW_FILES = (("tokenizer.model",), ("vocab.json", "merges.txt"))
_ENDS = ("bos_token", "eos_token")
_SPECIAL_KEYS = (*_ENDS, "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def load_tokenizer_files(directory: Path) -> TokenizerParts:
    """Read a tokenizer directory.

    Needed: `tokenizer.json`, or the files of a slow tokenizer (`tokenizer.model`, or `vocab.json` with
    `merges.txt`), which transformers converts. Optional, with what holds without them:

    - `tokenizer_config.json`, `special_tokens_map.json`: no BOS and EOS token by name (ids still come from
      `config.json` and `generation_config.json`).
    - a chat template (in `tokenizer_config.json`, `chat_template.jinja` or `chat_template.json`, the separate files
      winning): the model can't chat, only complete.

    BOS: `add_bos_token` in `tokenizer_config.json` where it is given, else what the post-processor of
    `tokenizer.json` does.

    Raises:
      CheckpointError: a needed file is missing, or a file is damaged.
    """
    config = read_optional_json_object(directory / "tokenizer_config.json")
    special = {**read_optional_json_object(directory / "special_tokens_map.json"), **_given(config)}
    backend = _load_backend(directory)
    named = {key: _token_text(special.get(key), key, directory) for key in _SPECIAL_KEYS}
    bos, eos = named["bos_token"], named["eos_token"]
    for key in _ENDS:
        token = named[key]
        if token is not None and backend.token_to_id(token) is None:
            raise CheckpointError(
                f"{directory / 'tokenizer_config.json'}: {key} {token!r} is not in the tokenizer's vocabulary"
            )
    _mark_special(backend, named.values())
    return TokenizerParts(
        backend=backend,
        chat_template=_chat_template(directory, config),
        bos_token=bos,
        eos_token=eos,
        add_bos=_settle_bos(backend, bos, config.get("add_bos_token")),
        other_special={key: text for key, text in named.items() if text is not None and key not in _ENDS},
    )


def save_tokenizer_files(parts: TokenizerParts, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` such that `load_tokenizer_files` gives the same parts."""
    directory.mkdir(parents=True, exist_ok=True)
    parts.backend.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **parts.other_special,
        "bos_token": parts.bos_token,
        "eos_token": parts.eos_token,
        "add_bos_token": parts.add_bos,
        "chat_template": parts.chat_template,
    }
    text = json.dumps(
        {key: value for key, value in config.items() if value is not None}, indent=2, ensure_ascii=False
    )
    (directory / "tokenizer_config.json").write_text(text + "\n", encoding="utf-8")


def _given(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if value is not None}


def _load_backend(directory: Path) -> Backend:
    from tokenizers import Tokenizer

    path = directory / "tokenizer.json"
    if path.exists() or path.is_symlink():
        read_json_object(path)  # for the better message: `tokenizers` says neither file nor place
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise CheckpointError(f"{path}: not a tokenizer ({_one_line(error)})") from error
    if any(all((directory / name).exists() for name in names) for names in _SLOW_FILES):
        return _convert_slow(directory)
    raise CheckpointError(
        f"{directory}: tokenizer.json is missing (and so are tokenizer.model and vocab.json with merges.txt)"
    )


def _convert_slow(directory: Path) -> Backend:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), use_fast=True, local_files_only=True)
    except Exception as error:  # missing sentencepiece, unknown class, damaged file: all end here
        raise CheckpointError(
            f"{directory}: has no tokenizer.json, and transformers cannot make one ({_one_line(error)})"
        ) from error
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise CheckpointError(f"{directory}: has no tokenizer.json, and its tokenizer has no fast version")
    return backend


def _token_text(value: Any, key: str, directory: Path) -> str | None:
    """A special token is written as a string, or as the fields of an AddedToken."""
    if isinstance(value, Mapping):
        value = value.get("content")
    if value is None or isinstance(value, str):
        return value or None
    raise CheckpointError(f"{directory / 'tokenizer_config.json'}: {key} must be a string, got {value!r}")


def _mark_special(backend: Backend, tokens: Iterable[str | None]) -> None:
    """Tokens that the configuration calls special must be so for the backend, too; unknown ones are left out."""
    from tokenizers import AddedToken

    special = {token.content for token in backend.get_added_tokens_decoder().values() if token.special}
    named = [token for token in tokens if token is not None and token not in special]
    known = [token for token in named if backend.token_to_id(token) is not None]
    if known:
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])


def _settle_bos(backend: Backend, bos: str | None, wanted: object) -> bool:
    """Make the post-processor do what `add_bos_token` asks for; returns whether BOS is added."""
    from jaxserve.checkpoint.gguf_tokenizer import add_bos_first

    if bos is None:
        return False
    bos_id = backend.token_to_id(bos)
    adds = backend.encode("", add_special_tokens=True).ids[:1] == [bos_id]
    if isinstance(wanted, bool) and wanted != adds:
        if wanted:
            add_bos_first(backend, bos)
        else:
            backend.post_processor = None
        return wanted
    return adds


def _chat_template(directory: Path, config: Mapping[str, Any]) -> str | None:
    jinja = directory / "chat_template.jinja"
    if os.path.lexists(jinja):  # a link that leads nowhere is no template left out
        try:
            return jinja.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{jinja}: cannot be read ({error})") from error
    in_file = read_optional_json_object(directory / "chat_template.json").get("chat_template")
    return _pick_template(in_file if in_file is not None else config.get("chat_template"), directory)


def _pick_template(value: Any, directory: Path) -> str | None:
    """A template, or of several named ones that called "default" (the only one, where there is just one)."""
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, Mapping):
        value = [{"name": name, "template": template} for name, template in value.items()]
    if isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value):
        named = {entry.get("name"): entry.get("template") for entry in value}
        template = named.get("default") or (next(iter(named.values())) if len(named) == 1 else None)
        if isinstance(template, str):
            return template
        if all(isinstance(entry, str) for entry in named.values()):
            return None  # several, none of them the default one
    raise CheckpointError(f"{directory}: chat_template must be a string or a list of named templates")


def _one_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
