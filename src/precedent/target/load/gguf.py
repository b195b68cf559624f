"""Reads GGUF files: converts each once to bfloat16 safetensors in the user's cache folder, keyed by its content."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from platformdirs import user_cache_path
from tokenizers import AddedToken
from tokenizers.pre_tokenizers import Digits, Sequence
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    modeling_gguf_pytorch_utils,
)
from transformers.utils import logging as transformers_logging

from precedent.errors import ModelLoadError, PrecedentError
from precedent.runtime.plain_values import in_one_line
from precedent.runtime.recomputable import computed_folder
from precedent.target.load.gguf_header import read_header
from precedent.target.support import check_loadable

READERS = ("gguf", "accelerate")
"""Packages that transformers needs to read a GGUF file."""

CONVERSION = 3
"""Increase it whenever a conversion's result changes, so that older ones in the user's cache folder are not used."""

SINGLE_DIGITS = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "minerva-7b"})
"""Pre-tokenizers, by llama.cpp's names, that split numbers into digits before GPT-2's rule; transformers does not."""

OF_GPT2 = frozenset({"", "default", "gpt-2"})
"""Pre-tokenizers that are GPT-2's own, which transformers also uses for names that it does not know."""

LONGEST_RUN = 256
"""No vocabulary has tokens of so many spaces."""

END_TOKEN_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""Metadata of a tokenizer that names tokens which end a text, a turn, or a message."""

SAMPLING_KEYS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""Recommended sampling settings in a header, below `general.sampling`, and their names in a generation config."""

log = logging.getLogger(__name__)


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
        model, tokenizer = _read(file)
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


def _read(file: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model, dequantised to bfloat16, and its tokenizer; what is wrong with the file is found before that work."""
    check_reader(file.name)
    header = read_header(file)
    if header.get("split.count", 1) != 1:
        raise ModelLoadError(
            f"{file} is one part of a model in several files; join them with `llama-gguf-split --merge` of llama.cpp"
        )
    check_loadable(read_config(file))
    dense = transformers.GgufConfig(dequantize=True)
    try:
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(**_in(file), quantization_config=dense, dtype=torch.bfloat16)
        # transformers takes the default of the config's class here, which is another checkpoint's token
        model.generation_config.eos_token_id = sorted(set(read_end_tokens(file).values())) or None
        model.generation_config.update(**read_sampling(file))
        tokenizer = read_tokenizer(file)
    except PrecedentError:
        raise
    except Exception as error:  # transformers raises all kinds of errors
        raise ModelLoadError(f"cannot convert {file}: {in_one_line(error)}") from error
    tokenizer.model_max_length = model.config.max_position_embeddings
    return model, tokenizer


def read_end_tokens(file: Path) -> dict[str, int]:
    """Ids of the tokens that end an answer, by the metadata keys that name them. Raises ModelLoadError."""
    header = read_header(file)
    found = {name: header.get(f"tokenizer.ggml.{name}") for name in END_TOKEN_KEYS}
    return {name: token for name, token in found.items() if isinstance(token, int) and token >= 0}


def read_config(file: Path) -> PreTrainedConfig:
    """The config of the converted model, without its weights. Raises ModelLoadError."""
    check_reader(file.name)
    try:
        with quiet():
            config: PreTrainedConfig = AutoConfig.from_pretrained(**_in(file))
    except Exception as error:  # an unknown architecture, or missing bytes of any tensor
        raise ModelLoadError(
            f"transformers cannot read the model in {file}: {in_one_line(error)}; if the file is cut short or damaged, "
            "copy or download it again"
        ) from error
    config.dtype = torch.bfloat16
    return config


def read_tokenizer(file: Path) -> PreTrainedTokenizerBase:
    """The tokenizer, splitting numbers as the model was trained to. Raises ModelLoadError."""
    check_reader(file.name)
    header = read_header(file)
    kind = header.get("tokenizer.ggml.pre", "")
    with quiet():
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**_in(file))
    if str(header.get("general.architecture")).startswith("gemma"):
        _match_runs_of_spaces(tokenizer)
    backend = tokenizer.backend_tokenizer
    if kind in SINGLE_DIGITS:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    elif kind not in OF_GPT2 and type(backend.pre_tokenizer).__name__ == "ByteLevel":
        log.warning(
            "%s: transformers does not know how a %r tokenizer splits text, and splits it as GPT-2 does; the model was "
            "trained on other tokens: give its original folder or id if answers are poor",
            file.name, kind,
        )  # fmt: skip
    return tokenizer


def read_sampling(file: Path) -> dict[str, float]:
    """The sampling settings that a file recommends, by their names in a generation config. Raises ModelLoadError."""
    header = read_header(file)
    found = {name: header.get(f"general.sampling.{key}") for key, name in SAMPLING_KEYS.items()}
    given = {name: value for name, value in found.items() if value is not None}
    return {"do_sample": True, **given} if given else {}


def check_reader(name: str) -> None:
    """Raise ModelLoadError early: transformers would notice a missing package only after half a minute."""
    missing = [package for package in READERS if importlib.util.find_spec(package) is None]
    outdated = [] if hasattr(transformers, "GgufConfig") else ["transformers"]
    if missing or outdated:
        raise ModelLoadError(f"{name} needs more packages; run: pip install -U {' '.join(missing + outdated)}")


def _match_runs_of_spaces(tokenizer: PreTrainedTokenizerBase) -> None:
    """Let tokens of several spaces match whole, the longest first, as SentencePiece matches user-defined pieces.

    transformers leaves them to the merges, which make two tokens of 16 out of 32 spaces instead of 31 and 1.
    """
    vocabulary = tokenizer.get_vocab()
    runs = [token for length in range(2, LONGEST_RUN) if (token := "\N{LOWER ONE EIGHTH BLOCK}" * length) in vocabulary]
    tokenizer.add_tokens([AddedToken(token, normalized=True, special=False) for token in runs])


def _in(file: Path) -> dict[str, Any]:
    """The arguments that make transformers read a GGUF file."""
    return {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}


_GGUF_READER: Any = modeling_gguf_pytorch_utils


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars and advice, not its errors; downloads keep the hub's own progress bar."""
    levels = [(each, each.get_verbosity()) for each in (transformers_logging, hub_logging)]
    bars, downloads_shown = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    bar_of_gguf, _GGUF_READER.tqdm = _GGUF_READER.tqdm, lambda items, **settings: items  # it ignores all settings
    for each, _ in levels:
        each.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    if downloads_shown:
        enable_progress_bars()
    try:
        yield
    finally:
        _GGUF_READER.tqdm = bar_of_gguf
        for each, level in levels:
            each.set_verbosity(level)
        if bars and downloads_shown:  # enabling also turns the hub's bars on
            transformers_logging.enable_progress_bar()
