"""Loads target and draft models from any Hugging Face id or folder, a GGUF file, or the demo's packaged target."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import (
    MODEL_FOR_MASKED_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from precedent.errors import ConfigError, ModelLoadError, UnsupportedError
from precedent.runtime.plain_values import in_one_line, is_number
from precedent.target.load.chat_template import CHATML, read_chat_template, refusing_template, say_what_lacks
from precedent.target.load.draft_folders import check_readable, check_whole, draft_at
from precedent.target.load.first_layers import FIRST_LAYERS, checked_count, first_layers, layers_of
from precedent.target.load.gguf_header import end_tokens_in, read_header, sampling_in
from precedent.target.load.source import (
    DEMO_TARGET,
    WHERE_FROM,
    Source,
    explained,
    find_source,
    merged,
    samples_as_recommended,
    stored_model,
    unmergeable,
)
from precedent.target.load.weight_files import (
    faults_of,
    layers_left_over,
    pointer_fault,
    quant_method,
    say_if_dense,
    too_many,
)
from precedent.target.quantised import is_quantised
from precedent.target.support import check_loadable, missing, quantised_reader

if TYPE_CHECKING:
    from precedent.target.load.stores import StoredModel

DTYPES = ("auto", "bfloat16", "float16", "float32", "float64")

QUANTIZATIONS = ("int8", "int4")
"""What `quantization` may be: eight bits with a scale for 32 inputs, or four bits with a scale and a minimum."""

TOO_LONG = "sequence-length-is-longer-than-the-specified-maximum"
"""The name under which a tokenizer of transformers notes that it has warned of a long text."""

OURS = {
    "dtype": "give dtype= itself",
    "torch_dtype": "give dtype= itself",
    "trust_remote_code": "code from a model repository is never run; load the model yourself and pass it",
    "output_loading_info": "incomplete weights are always refused",
    **dict.fromkeys(
        ("tp_plan", "tp_size", "device_mesh", "distributed_config"),
        "Precedent runs a model in one process; a model that one device cannot hold is served with vLLM and "
        "precedent-vllm",
    ),
}
"""Arguments of `from_pretrained` that have their own parameter here, and what to do instead."""

log = logging.getLogger(__name__)

__all__ = ["DEMO_TARGET", "DTYPES", "FIRST_LAYERS", "load_draft", "load_target"]


def load_target(
    name_or_path: str | Path,
    *,
    device: str | None = None,
    dtype: str | None = None,
    quantization: str | None = None,
    accurate: bool = False,
    model_kwargs: Mapping[str, Any] | None = None,
    chat_template: str | Path | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a language model and its tokenizer from a Hugging Face id, a folder, a GGUF file or `DEMO_TARGET`.

    Names of Ollama's and LM Studio's models, and of GGUF files on the hub, are those of `stored_model`.
    `device` None is cuda if available, else cpu; "auto" spreads the layers over all devices. `dtype` None or "auto"
    keeps the dtype in which the weights are stored. `quantization` "int8" or "int4" makes codes of these bits of a
    checkpoint's linear layers on a CPU. With `accurate`, kernels round inputs of products with quantised weights to 16
    bits instead of 8. `model_kwargs` go to transformers' `from_pretrained` unchanged
    (`device_map`, `max_memory`, `quantization_config`, ...). `chat_template` replaces the tokenizer's own: a text, a
    file or a family's name. Raises ConfigError for a wrong setting, ModelLoadError if nothing can be loaded,
    UnsupportedError for a model whose layers cannot be rewound.
    """
    template = None if chat_template is None else read_chat_template(chat_template)
    settings = dict(model_kwargs or {})
    for name in sorted(settings.keys() & OURS.keys()):
        raise ConfigError(f"model_kwargs cannot hold {name!r}: {OURS[name]}")
    if dtype is not None and dtype not in DTYPES:
        raise ConfigError(f"dtype={dtype!r} is not one of {', '.join(DTYPES)}")
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization={quantization!r} is not one of {', '.join(QUANTIZATIONS)}")
    if device == "auto":
        device = None
        settings.setdefault("device_map", "auto")
    place = device_named(device)
    source = find_source(name_or_path, settings)
    if source.file is not None and device is None and _is_device(settings.get("device_map")):
        place = device_named(settings.pop("device_map"), "device_map")
    stored, adapter = source.stored, source.adapter
    if stored is not None:
        say_what_is_kept(str(name_or_path), stored)
    config = _checked_config(source)
    tokenizer = _load_tokenizer(source, template)
    if template is None and str(name_or_path) != DEMO_TARGET and not config.is_encoder_decoder:
        say_what_lacks(name_or_path, tokenizer.chat_template, has_chatml=CHATML in tokenizer.get_vocab())
    if adapter is not None and source.file is not None and dtype in (None, "auto"):
        dtype = "bfloat16"  # an adapter is merged into ordinary weights
    model = _load_model(source, config, place, dtype or "auto", settings, quantization)
    if accurate:
        modules: Any = model.modules()
        for module in modules:
            if hasattr(module, "accurate"):
                module.accurate = True
        if not is_quantised(model):
            raise UnsupportedError(f"accurate=True is for quantised weights on a CPU, and {name_or_path} has none here")
    if stored is not None:
        recommend(stored, model.generation_config, tokenizer)
    return (model if adapter is None else merged(model, adapter)), tokenizer


def load_tokenizer(name_or_path: str | Path, chat_template: str | Path | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of anything that `load_target` accepts, without its model.

    Raises ModelLoadError, and ConfigError for a `chat_template` that cannot be read.
    """
    template = None if chat_template is None else read_chat_template(chat_template)
    return _load_tokenizer(find_source(name_or_path), template)


def load_config(name_or_path: str | Path) -> PreTrainedConfig:
    """Load the config of anything that `load_target` accepts, without its weights. Raises ModelLoadError."""
    source = find_source(name_or_path)
    with explained(source.place, "the config of"):
        return _read_config(source)


def load_generation_config(name_or_path: str | Path) -> GenerationConfig:
    """Load the generation config of anything that `load_target` accepts, without its model. Raises ModelLoadError.

    That of a GGUF file holds only what its header and its store say about sampling.
    """
    source = find_source(name_or_path)
    with explained(source.place, "the generation config of"):
        if source.file is not None:
            return GenerationConfig(
                **sampling_in(read_header(source.file)) | dict(source.stored.sampling if source.stored else {})
            )
        try:
            found: GenerationConfig = GenerationConfig.from_pretrained(source.place)
        except OSError:  # there is no such file: transformers then derives one from the config
            found = GenerationConfig.from_model_config(_read_config(source))
    return found


def recommended(name: str, file: Path, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
    """What a GGUF file, and the program that keeps it, say about end tokens and sampling; the log says it too."""
    found = load_generation_config(name)
    found.eos_token_id = sorted(set(end_tokens_in(read_header(file)).values())) or None
    stored = stored_model(name)
    if stored is not None:
        say_what_is_kept(name, stored)
        recommend(stored, found, tokenizer)
    return found


def load_draft(
    spec: str | Path | PreTrainedModel,
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: str | None = None,
    source: Source | None = None,
) -> PreTrainedModel:
    """Load a model that drafts for a target: a Hugging Face id, a folder, a loaded model, or "first-layers:N".

    `drafters.registry` loads drafts of other kinds. The model gets the target's dtype, or keeps its own if one of
    the two is quantised, and the target's device unless `device` names another (modules that the two share are
    copied there). Its logits `[..., vocab_size]` are as wide as the target's. `source` is what `find_source` gave,
    where it was asked. Raises ConfigError for a device that is not available, ModelLoadError if its tokenizer is
    not the target's or it is a draft of another kind, UnsupportedError if its layers cannot be rewound.
    """
    if not isinstance(spec, str | Path):
        if device is not None:
            raise ConfigError(f"draft_device={device!r} cannot be set for a model object: move the model there first")
        check_loadable(spec.config)
        return _with_width(spec, _width(target))
    place = target.device if device is None else device_named(device, "draft_device")
    if str(spec).startswith(FIRST_LAYERS):
        count = checked_count(str(spec), len(layers_of(target)))
        return copied_to(first_layers(target, count), place)
    source = source or find_source(spec)
    check_readable(source.place)
    check_same_vocabulary(str(spec), _load_tokenizer(source), tokenizer)
    config = _checked_config(source)
    keeps = source.file is not None or quant_method(config) is not None or is_quantised(target)
    draft = _load_model(source, config, place, "auto" if keeps else target.dtype, {})
    if source.adapter is not None:
        draft = merged(draft, source.adapter)
    return _with_width(draft, _width(target))


def load_beside(
    spec: str | Path | PreTrainedModel,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase,
    *,
    device: str | None = None,
) -> PreTrainedModel:
    """A draft model for a target that another program computes; its logits are `[..., vocab_size]`.

    Raises what `load_target` raises, ModelLoadError for another tokenizer than the target's, UnsupportedError for
    "first-layers:N", and for a draft that reads its target.
    """
    if isinstance(spec, str | Path) and str(spec).startswith(FIRST_LAYERS):
        raise UnsupportedError(f"draft_model={str(spec)!r} shares its target's layers, which another program has here")
    if not isinstance(spec, str | Path):
        check_loadable(spec.config)
        return _with_width(spec, vocab_size)
    if (found := draft_at(find_source(spec).place)) is not None:
        raise UnsupportedError(f"{spec} holds {found}, which reads its target's layers: another program has those here")
    draft, own = load_target(spec, device=device)
    check_same_vocabulary(str(spec), own, tokenizer)
    return _with_width(draft, vocab_size)


def copied_to(draft: PreTrainedModel, device: torch.device) -> PreTrainedModel:
    """A draft that shares its target's modules, or a copy of it on another device.

    Raises UnsupportedError for a quantised one on another device than a CPU.
    """
    if device.type != "cpu" and is_quantised(draft):
        raise UnsupportedError(f"draft_device={str(device)!r}: the target's quantised weights are computed on its CPU")
    copied: Any = draft if draft.device == device else copy.deepcopy(draft)
    found: PreTrainedModel = copied.to(device)
    return found


def _load_tokenizer(source: Source, template: str | None = None) -> PreTrainedTokenizerBase:
    stored, source = source.stored, source.of_tokenizer
    with explained(source.place, "the tokenizer of"):
        tokenizer: PreTrainedTokenizerBase
        if source.file is None:
            for file in filter(Path.is_file, Path(source.place).glob("tokenizer.*")):
                if (fault := pointer_fault(file)) is not None:
                    raise ModelLoadError(fault)
            tokenizer = AutoTokenizer.from_pretrained(source.place, trust_remote_code=False, **source.where)
        else:
            from precedent.target.load.gguf import read_tokenizer

            tokenizer = read_tokenizer(source.file)
    if template is not None:
        tokenizer.chat_template = template
    elif stored is not None and stored.template and not tokenizer.chat_template:
        tokenizer.chat_template = refusing_template(stored.name, stored.template)
    if stored is not None and stored.system:
        tokenizer.default_system_message = stored.system
    getattr(tokenizer, "deprecation_warnings", {})[TOO_LONG] = True  # warned of already: we refuse such a prompt
    return tokenizer


def _read_config(source: Source) -> PreTrainedConfig:
    if source.file is not None:
        from precedent.target.load.gguf import read_config  # here, and below: few models are in such a file

        return read_config(source.file)
    check_whole(source.place, source.where)
    config: PreTrainedConfig = AutoConfig.from_pretrained(source.place, trust_remote_code=False, **source.where)
    return config


def _checked_config(source: Source) -> PreTrainedConfig:
    with explained(source.place, "the model"):
        config = _read_config(source)
        auto_class(config)
        check_loadable(config)
        folder = isinstance(source.place, Path) and source.place.is_dir() and "subfolder" not in source.where
        for fault in faults_of(Path(source.place), config) if folder else ():
            raise ModelLoadError(fault)
    return config


def _load_model(
    source: Source,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: str | torch.dtype,
    settings: Mapping[str, Any],
    quantization: str | None = None,
) -> PreTrainedModel:
    settings = {name: value for name, value in settings.items() if name not in WHERE_FROM}
    place, placed, method, auto = source.place, {**settings, **source.where}, quant_method(config), auto_class(config)
    others = sorted(settings.keys() - {"attn_implementation"} | placed.keys() & {"subfolder"})
    if quantization is not None:
        asked = f"quantization={quantization!r}"
        for refused, why in (
            (source.adapter, "is not available for an adapter: merge it into a model"),
            (device.type != "cpu", f"is for a CPU, and the device is {device}: leave it out"),
            (dtype != "auto", f"computes in float32: leave dtype={dtype!r} out"),
            (others, f"cannot be given with model_kwargs {', '.join(map(repr, others))}"),
            (source.file or method, f"is not available for {place}: it is quantised already"),
            (auto is not AutoModelForCausalLM, f"is not available for {config.model_type}"),
        ):
            if refused:
                raise UnsupportedError(f"{asked} {why}")
    if source.file is not None:
        from precedent.target.load.gguf import load_gguf

        wanted = None if dtype == "auto" else dtype if isinstance(dtype, torch.dtype) else getattr(torch, dtype)
        return load_gguf(source.file, config, device, wanted, placed)
    plain = auto is AutoModelForCausalLM and device.type == "cpu" and dtype == "auto" and not others
    if plain and (quantization or method):
        with explained(place, "the model"):
            read = quantised_reader(source.folder, config, quantization)
            if quantization is not None and read is None:
                raise missing("quantization", f"quantization={quantization!r}")
            if read is not None and source.adapter is not None:
                raise unmergeable(source.adapter, method)
            made = None if read is None else read(settings)
        if made is not None:
            return made
    if method is not None or "quantization_config" in placed:
        placed.setdefault("device_map", {"": device})  # quantised weights load in place and are never moved
    with explained(place, "the model"):
        loaded: Any = auto.from_pretrained(
            place, dtype=dtype, trust_remote_code=False, output_loading_info=True, **placed
        )
    model, report = loaded
    if report["missing_keys"]:  # transformers would continue with random weights
        packed = f", or transformers does not know their quantisation, {method!r}" if method else ""
        raise ModelLoadError(
            f"the weights in {place} are incomplete{packed}: {min(report['missing_keys'])} is missing; "
            "get all of its files again, or give another model"
        )
    left_over = layers_left_over(set(report["unexpected_keys"]), model.config)
    if left_over:  # transformers would leave them out
        raise ModelLoadError(too_many(place, left_over, model.config.get_text_config().num_hidden_layers))
    ready: PreTrainedModel = model if "device_map" in placed else model.to(device)
    if auto is AutoModelForImageTextToText:
        ready = language_model_of(ready)
    ready.eval().requires_grad_(False)
    if method is not None:
        say_if_dense(ready, method, place)
    return ready


def _is_device(places: Any) -> bool:
    """Whether a `device_map` is the name of one device."""
    return isinstance(places, str) and places.partition(":")[0] in ("cpu", "cuda")


def device_named(device: str | None, name: str = "device") -> torch.device:
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:  # torch built without CUDA raises AssertionError
        others = "or auto" if name == "device" else "or cuda:1"
        raise ConfigError(
            f"{name}={device!r} cannot be used here ({in_one_line(error)}); give cpu, cuda {others}"
        ) from error


def check_same_vocabulary(spec: str, draft: PreTrainedTokenizerBase, target: PreTrainedTokenizerBase) -> None:
    """Raise ModelLoadError unless draft and target map every token id to the same text."""
    drafted, targeted = ({index: token for token, index in each.get_vocab().items()} for each in (draft, target))
    differing = [index for index in drafted.keys() | targeted.keys() if drafted.get(index) != targeted.get(index)]
    if differing:
        first = min(differing)
        raise ModelLoadError(
            f"the draft model {spec} does not share the target's tokenizer: token {first} is {drafted.get(first)!r} "
            f"there and {targeted.get(first)!r} in the target; give a draft model of the same family"
        )


def _width(model: PreTrainedModel) -> int:
    """Entries in a row of logits; models of one family may pad their vocabularies to different sizes."""
    return int(model.config.get_text_config().vocab_size)


def _with_width(draft: PreTrainedModel, width: int) -> PreTrainedModel:
    """Make rows of logits `width` long: padding ids that only the target has get probability 0, extra ones are cut."""
    head = draft.get_output_embeddings()
    if head is not None and _width(draft) != width:

        def same_width(module: nn.Module, inputs: Any, logits: Tensor) -> Tensor:
            return pad(logits, (0, width - logits.shape[-1]), value=float("-inf"))

        head.register_forward_hook(same_width)
    return draft


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads a model of this config. Raises UnsupportedError if none generates text."""
    if config.is_encoder_decoder:
        return AutoModelForSeq2SeqLM
    if type(config) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(config, "is_decoder", True):
        raise UnsupportedError(
            f"{config.model_type} with is_decoder=False is an encoder, in which a token sees those after it: give a "
            "causal language model"
        )
    for auto in (AutoModelForCausalLM, AutoModelForImageTextToText):
        if type(config) in auto._model_mapping:
            return auto
    raise UnsupportedError(
        f"{config.model_type} is not a model that generates text in this version of transformers: give a causal "
        "language model, or a multimodal one that AutoModelForImageTextToText loads"
    )


def language_model_of(model: PreTrainedModel) -> PreTrainedModel:
    """The language model of a multimodal model, as a causal LM of its own family that shares its weights.

    A model whose text part is not of a family of its own, such as Qwen-VL's, is returned whole: it takes text alone.
    """
    text: PreTrainedConfig = model.config.get_text_config()
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel) and part.config is text]
    head = model.get_output_embeddings()
    if text is model.config or head is None or not parts or type(text) not in AutoModelForCausalLM._model_mapping:
        return model
    with torch.device("meta"):  # no memory: all of its parts are replaced
        causal: Any = AutoModelForCausalLM.from_config(text)
    if type(parts[0]) is type(causal):
        causal = parts[0]
    elif type(parts[0]) is type(causal.base_model):
        setattr(causal, causal.base_model_prefix, parts[0])
        causal.set_output_embeddings(head)
        causal.generation_config = model.generation_config
    if any(tensor.is_meta for tensor in (*causal.parameters(), *causal.buffers())):
        return model
    causal.config._name_or_path = getattr(model.config, "_name_or_path", "")
    found: PreTrainedModel = causal
    return found


def say_what_is_kept(name: str, stored: StoredModel) -> None:
    """Log which file another program's name means, and which settings come with it."""
    for note in stored.notes:
        log.warning("%s: %s", name, note)
    if samples_as_recommended(name, None):
        log.info(
            "%s is %s; settings that you do not give are its own (%s), unless sampling='precedent'",
            name, stored.file, shown_settings(sampling_defaults(load_generation_config(name))),
        )  # fmt: skip


def recommend(stored: StoredModel, generation_config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    """Add what another program keeps for a model to its generation config; control tokens that stop are end tokens."""
    control = {one.content: token for token, one in tokenizer.added_tokens_decoder.items() if one.special}
    stops = stored.sampling.get("stop", ())
    ends = {control[text] for text in stops if text in control} | set(generation_config.eos_token_id or ())
    generation_config.eos_token_id = sorted(ends) or None
    for name, value in stored.sampling.items():
        setattr(generation_config, name, value)
    generation_config.stop = tuple(text for text in stops if text not in control) or None


SAMPLERS = ("temperature", "top_k", "top_p", "min_p")
OTHERS = ("repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "stop", "max_tokens")
"""Settings that both a generation config and `SamplingParams` have: how tokens are sampled, and the rest."""


def sampling_defaults(generation_config: Any) -> dict[str, Any]:
    """Return the settings that a generation config gives, under the names of `SamplingParams`; empty without any.

    `do_sample: false` is temperature 0. One that samples without a temperature means 1, as in transformers.
    """
    samplers, others = (
        {name: value for name in names if (value := getattr(generation_config, name, None)) is not None}
        for names in (SAMPLERS, OTHERS)
    )
    samples = getattr(generation_config, "do_sample", None)
    if samples is False:
        return {"temperature": 0.0} | others
    if samples or samplers:
        samplers.setdefault("temperature", 1.0)
    return samplers | others


def shown_settings(found: Mapping[str, Any]) -> str:
    """Settings in words."""
    return (
        ", ".join(f"{name} {value:g}" if is_number(value) else f"{name} {value}" for name, value in found.items())
        or "none"
    )
