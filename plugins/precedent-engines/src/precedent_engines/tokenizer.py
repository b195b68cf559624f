"""Tokenizers of a service: one of transformers, or a tokenizer.json, which needs neither transformers nor torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.errors import ConfigError, ModelLoadError
from precedent.runtime.plain_values import first_line
from precedent.text.codec import TokenizerCodec

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

NAME = "tokenizer.json"
SETTINGS = "tokenizer_config.json"


class FileTokenizer:
    """A tokenizer.json with what a codec asks a tokenizer of transformers for."""

    def __init__(self, backend: Tokenizer, end_token: str | None) -> None:
        self.backend_tokenizer = backend
        self.eos_token_id: int | None = None if end_token is None else backend.token_to_id(end_token)

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """The ids of all tokens, added ones included."""
        return self.backend_tokenizer.get_vocab(with_added_tokens=True)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of `token_ids`."""
        return self.backend_tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)


def codec_of(tokenizer: PreTrainedTokenizerBase | str | Path) -> tuple[TokenizerCodec, int]:
    """The codec of a tokenizer, and the number of its token ids; a text is a file, a folder or a Hugging Face id.

    Raises ModelLoadError for what cannot be read, ConfigError for what is no tokenizer.
    """
    found: Any = read_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
    if not hasattr(found, "get_vocab") or not hasattr(found, "eos_token_id"):
        raise ConfigError(
            f"a {type(found).__name__} is no tokenizer: give one of transformers, a {NAME}, its folder or a "
            "Hugging Face id"
        )
    return TokenizerCodec(found), len(found)


def read_tokenizer(name_or_path: str | Path) -> FileTokenizer:
    """Read a tokenizer.json, and the end token from the settings beside it. Raises ModelLoadError."""
    path = Path(name_or_path).expanduser()
    if path.is_dir():
        return _read(path / NAME, path / SETTINGS)
    if path.is_file() or path.suffix == ".json":
        return _read(path, path.with_name(SETTINGS))
    return _from_hub(str(name_or_path))


def _read(file: Path, settings: Path) -> FileTokenizer:
    from tokenizers import Tokenizer

    if not file.is_file():
        raise ModelLoadError(f"there is no {str(file)!r}: give a {NAME}, or a transformers tokenizer object")
    try:
        backend = Tokenizer.from_file(str(file))
        end_token = _end_token(json.loads(settings.read_text(encoding="utf-8"))) if settings.is_file() else None
    except Exception as error:  # the package raises bare exceptions
        raise ModelLoadError(f"the tokenizer in {str(file.parent)!r} cannot be read: {first_line(error)}") from error
    return FileTokenizer(backend, end_token)


def _end_token(settings: Any) -> str | None:
    end = settings.get("eos_token")
    found = end.get("content") if isinstance(end, dict) else end
    return found if isinstance(found, str) else None


def _from_hub(repo_id: str) -> FileTokenizer:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    try:
        file = Path(hf_hub_download(repo_id, NAME))
        with suppress(EntryNotFoundError):  # then no token is known to end an answer
            hf_hub_download(repo_id, SETTINGS)
    except Exception as error:  # depends on the HTTP client that the hub's library uses
        raise ModelLoadError(
            f"{repo_id!r} is no file or folder, and its {NAME} cannot be fetched from the hub: {first_line(error)}; "
            f"fetch it where there is a network with `hf download {repo_id} {NAME} {SETTINGS}` and give that folder"
        ) from error
    return _read(file, file.with_name(SETTINGS))
