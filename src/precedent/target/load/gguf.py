"""Reads GGUF files: converts each once to bfloat16 safetensors in the user's cache folder, keyed by its content."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from platformdirs import user_cache_path
from tokenizers import AddedToken
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from precedent.errors import ModelLoadError, PrecedentError
from precedent.runtime.plain_values import in_one_line
from precedent.runtime.recomputable import computed_folder
from precedent.target.load.quiet import quiet
from precedent.target.support import check_loadable

MAGIC = b"GGUF"

READERS = ("gguf", "accelerate")
"""Packages that transformers needs to read a GGUF file."""

CONVERSION = 3
"""Increase it whenever a conversion's result changes, so that older ones in the user's cache folder are not used."""

SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"})
"""Pre-tokenizers, by llama.cpp's names, that split numbers into digits before GPT-2's rule; transformers does not."""

LONGEST_RUN = 256
"""No vocabulary has tokens of so many spaces."""

END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Metadata of a tokenizer that names tokens which end a text, a turn, or a message."""

SAMPLING_KEYS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""Recommended sampling settings in a header, below `general.sampling`, and their names in a generation config."""

OF_GPT2 = frozenset({"", "default", "gpt-2"})
"""Pre-tokenizers that are GPT-2's own, which transformers also uses for names that it does not know."""

log = logging.getLogger(__name__)


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def gguf_folder(file: Path) -> Path:
    """The folder of a GGUF file's model as bfloat16 safetensors; converts it at first use, and logs that.

    Raises ModelLoadError for a file that is truncated, one of several parts, or without a language model that
    transformers reads; also if a package is missing or the folder cannot be written. Raises UnsupportedError for layers
    that cannot be rewound.
    """
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()[:16]
    folder = user_cache_path("precedent") / "gguf" / f"{file.stem[:60]}-{digest}-{CONVERSION}"
    return converted(file, folder, file.name)


def converted(file: Path, folder: Path, name: str) -> Path:
    """`folder`, with the model of a GGUF file written there unless it is there, undamaged. Raises ModelLoadError."""

    def convert(into: Path) -> None:
        log.warning("converting %s to bfloat16 in %s, once: half a minute or more ...", name, folder)
        model, tokenizer = _checked(file)
        with quiet():
            model.save_pretrained(into)
            tokenizer.save_pretrained(into)

    try:
        return computed_folder(folder, f"conversion {CONVERSION}", convert)
    except OSError as error:
        raise ModelLoadError(
            f"cannot keep the converted {name} in {folder.parent} ({error.strerror or error}); free two bytes for "
            "each of its weights there, or set XDG_CACHE_HOME to a folder that you may write"
        ) from error


def _checked(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model and its tokenizer; checks the file before the long work, and reports its faults in one line."""
    check_reader(file.name)
    if _header(file).parts > 1:
        raise ModelLoadError(
            f"{file} is one part of a model in several files; join them with `llama-gguf-split --merge` of llama.cpp"
        )
    check_loadable(read_config(file))
    try:
        return _read(file)
    except PrecedentError:
        raise
    except Exception as error:  # transformers raises all kinds of errors
        raise ModelLoadError(f"cannot convert {file}: {in_one_line(error)}") from error


def _read(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, with its weights dequantised to bfloat16, and its tokenizer."""
    from transformers import GgufConfig  # newer than the oldest transformers that everything else supports

    dense = GgufConfig(dequantize=True)
    with quiet():
        model = AutoModelForCausalLM.from_pretrained(**_in(file), quantization_config=dense, dtype=torch.bfloat16)
    # transformers takes the default of the config's class here, which is another checkpoint's token
    model.generation_config.eos_token_id = sorted(set(_header(file).end_tokens.values())) or None
    model.generation_config.update(**read_sampling(file))
    tokenizer = read_tokenizer(file)
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


def read_end_tokens(file: Path) -> dict[str, int]:
    """Ids of the tokens that end an answer, by the metadata keys that name them. Raises ModelLoadError."""
    check_reader(file.name)
    return _header(file).end_tokens


def read_config(file: Path) -> PreTrainedConfig:
    """The config of the converted model, without its weights. Raises ModelLoadError."""
    check_reader(file.name)
    try:
        with quiet():
            config: PreTrainedConfig = AutoConfig.from_pretrained(**_in(file))
    except Exception as error:  # an unknown architecture, or a header that ends too soon
        raise ModelLoadError(
            f"transformers cannot read the model in {file}: {in_one_line(error)}; if the file is cut short or damaged, "
            "copy or download it again"
        ) from error
    config.dtype = torch.bfloat16
    return config


def read_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer, splitting numbers as the model was trained to. Raises ModelLoadError."""
    check_reader(file.name)
    with quiet():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**_in(file))
    header = _header(file)
    kind = header.pre_tokenizer
    if header.architecture.startswith("gemma"):
        _match_runs_of_spaces(tokenizer)
    if kind in SINGLE_DIGITS:
        _split_digits(tokenizer)
    elif kind not in OF_GPT2 and _splits_as_gpt2(tokenizer):
        log.warning(
            "%s: transformers does not know how a %r tokenizer splits text, and splits it as GPT-2 does; the model was "
            "trained on other tokens: give its original folder or id if answers are poor",
            file.name, kind,
        )  # fmt: skip
    return tokenizer


def read_sampling(file: Path) -> dict[str, float]:
    """The sampling settings that a file recommends, by their names in a generation config. Raises ModelLoadError."""
    check_reader(file.name)
    found = {name: value for name, value in _header(file).sampling.items() if value is not None}
    return {"do_sample": True, **found} if found else {}


def check_reader(name: str) -> None:
    """Raise ModelLoadError early: transformers would notice a missing package only after half a minute."""
    missing = [package for package in READERS if importlib.util.find_spec(package) is None]
    outdated = [] if hasattr(transformers, "GgufConfig") else ["transformers"]
    if missing or outdated:
        raise ModelLoadError(f"{name} needs more packages; run: pip install -U {' '.join(missing + outdated)}")


def _split_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Split numbers into digits before anything else."""
    from tokenizers.pre_tokenizers import Digits, Sequence

    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])


def _match_runs_of_spaces(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let tokens of several spaces match whole, the longest first, as SentencePiece matches user-defined pieces.

    transformers leaves them to the merges, which make two tokens of 16 out of 32 spaces instead of 31 and 1.
    """
    vocabulary = tokenizer.get_vocab()
    runs = [token for length in range(2, LONGEST_RUN) if (token := "\N{LOWER ONE EIGHTH BLOCK}" * length) in vocabulary]
    tokenizer.add_tokens([AddedToken(token, normalized=True, special=False) for token in runs])


class _Header(NamedTuple):
    """What is read from a file before transformers reads it."""

    architecture: str
    pre_tokenizer: str
    parts: int
    end_tokens: dict[str, int]
    """Ids of tokens that end a text, a turn or a message, by their metadata keys."""
    sampling: dict[str, float | None]
    """Recommended sampling settings, by their names in a generation config."""


def _header(file: Path) -> _Header:
    """Read the header, and check the whole file, tensors included. Raises ModelLoadError if it ends too soon."""
    from gguf import GGUFReader

    try:
        fields = GGUFReader(file).fields
    except Exception as error:  # numpy raises various errors for missing bytes
        raise ModelLoadError(
            f"{file} is cut short or damaged ({in_one_line(error)}): copy or download it again"
        ) from error

    def value(name: str, default: Any) -> Any:
        return fields[name].contents() if name in fields else default

    ends = {name: int(value(f"tokenizer.ggml.{name}", -1)) for name in END_TOKEN_KEYS}
    return _Header(
        str(value("general.architecture", "")),
        str(value("tokenizer.ggml.pre", "")),
        int(value("split.count", 1)),
        {name: token for name, token in ends.items() if token >= 0},
        {name: value(f"general.sampling.{key}", None) for key, name in SAMPLING_KEYS.items()},
    )


def _in(file: Path) -> dict[str, Any]:
    """The arguments that make transformers read a GGUF file."""
    return {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}


def _splits_as_gpt2(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether only GPT-2's rule splits text, which is what transformers falls back to for rules it does not know."""
    return type(tokenizer.backend_tokenizer.pre_tokenizer).__name__ == "ByteLevel"
