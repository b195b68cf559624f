"""The checks of `precedent doctor`; each reads a model's files and reports one thing."""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers.cache_utils import get_layer_types_and_kwargs

from precedent.drafters.registry import draft_kinds
from precedent.errors import ModelLoadError, PrecedentError, UnsupportedError
from precedent.grammar import is_installed
from precedent.runtime.device_memory import free_bytes
from precedent.runtime.plain_values import shown
from precedent.target.kv.layer_kinds import (
    INDEXED,
    RECURRENT,
    UNLIMITED,
    WITH_KEYS,
    context_length,
    why_only_chains,
)
from precedent.target.load import chat_template as templates
from precedent.target.load.draft_folders import check_readable
from precedent.target.load.first_layers import FIRST_LAYERS, checked_count
from precedent.target.load.gguf import GgufFile, open_gguf
from precedent.target.load.gguf_header import end_tokens_in, read_header
from precedent.target.load.loading import (
    auto_class,
    check_same_vocabulary,
    load_config,
    load_generation_config,
    load_tokenizer,
    sampling_defaults,
    shown_settings,
)
from precedent.target.load.source import find_source, gguf_file, samples_as_recommended, stored_model, unmergeable
from precedent.target.load.weight_files import UNPACKED_BY_FIRST_FORWARD, faults_of, quant_method
from precedent.target.support import check_loadable, quantised_reader
from precedent.text.answers import answer_syntax
from precedent.text.end_tokens import configured_ends, end_tokens
from precedent.text.prompt import render_prompt
from precedent.text.tool_formats.formats import reasoning_tags

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

State = Literal["yes", "no", "note"]

GIGABYTE = 1e9

USER = {"role": "user", "content": "hello"}
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look up.", "parameters": {"type": "object", "properties": {}}},
}


GPU_ONLY = {"fp8": (8, 9), "mxfp4": (7, 5)}
"""Methods whose kernels need a GPU of this compute capability; transformers dequantises their weights elsewhere."""

PACKAGES = {
    "torchao": "torchao", "compressed-tensors": "compressed_tensors", "bitsandbytes": "bitsandbytes",
    "gptq": "gptqmodel", "awq": "gptqmodel", "hqq": "hqq", "quanto": "optimum", "aqlm": "aqlm", "eetq": "eetq",
    "vptq": "vptq", "auto-round": "auto_round", "spqr": "spqr_quant", "fp_quant": "fp_quant", "quark": "quark",
    "fp8": "accelerate", "fbgemm_fp8": "fbgemm_gpu", "mxfp4": "accelerate", "bitnet": "accelerate",
}  # fmt: skip
"""The package that transformers needs to load weights of a method."""

DISTRIBUTIONS = {
    "compressed_tensors": "compressed-tensors", "optimum": "optimum-quanto", "auto_round": "auto-round",
    "spqr_quant": "spqr-quant", "fp_quant": "fp-quant", "quark": "amd-quark", "fbgemm_gpu": "fbgemm-gpu",
}  # fmt: skip
"""Names under which pip installs some of them."""


@dataclass(frozen=True, slots=True)
class KindInUse:
    """The tensors of one type in a file: bytes in the file, and in memory once they are loaded."""

    kind: str
    count: int
    stored: int
    held: int
    as_stored: bool


def kinds_in_use(content: GgufFile, device: torch.device) -> list[KindInUse]:
    """The types of a file's tensors by their bytes, and what becomes of them on a device."""
    found: dict[tuple[str, bool], list[tuple[int, int]]] = {}
    for entry, stays, held in content.in_memory(device):
        found.setdefault((entry.kind, stays), []).append((entry.nbytes, held))
    made = [
        KindInUse(kind, len(each), sum(stored for stored, _ in each), sum(held for _, held in each), stays)
        for (kind, stays), each in found.items()
    ]
    return sorted(made, key=lambda one: -one.stored)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; the model is unusable only if a `needed` finding has state `no`."""

    check: str
    state: State
    finding: str
    needed: bool = False


def examine_files(
    model: str, draft_model: str | None, device: str | None, chat_template: str | None = None
) -> Iterator[Finding]:
    """All findings about a model. Raises ModelLoadError if its config cannot be loaded."""
    config = load_config(model)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    file = gguf_file(model)
    kinds = [] if file is None else kinds_in_use(open_gguf(file), place)
    yield from _weights(model, config, place)
    yield from _kinds(kinds, place)
    yield from _layers(config)
    yield from _context(config)
    yield from _memory(config, place, sum(kind.held for kind in kinds) or None)
    try:
        tokenizer = load_tokenizer(model, chat_template)
    except ModelLoadError as error:
        yield Finding("tokenizer", "no", str(error), needed=True)
        return
    if config.is_encoder_decoder:
        yield Finding("chat", "no", "an encoder-decoder model holds no conversation: use PrecedentLLM or Engine")
    else:
        yield _template(tokenizer, given=chat_template is not None)
        yield _tools(tokenizer)
    yield from (_ends(model, config, tokenizer), _sampling(model), _grammar(tokenizer))
    tags = reasoning_tags(tokenizer, str(tokenizer.chat_template or ""))
    yield Finding("reasoning", "note", f"between {tags.open.strip()} and {tags.close}" if tags else "none")
    yield _draft(draft_model, tokenizer, config)


def _loads_dense(method: str, device: torch.device) -> bool:
    """Whether weights of a method will be dequantised on a device: to the size of a model that was never quantised."""
    if method == UNPACKED_BY_FIRST_FORWARD:
        return True
    needed = GPU_ONLY.get(method)
    return needed is not None and (device.type != "cuda" or torch.cuda.get_device_capability(device) < needed)


def _read_as_stored(model: str, config: Any, place: torch.device) -> bool:
    """Whether a checkpoint on this machine is quantised in a way that is run without its package."""
    if place.type != "cpu" or quant_method(config) is None:
        return False
    folder = find_source(model).place
    if not isinstance(folder, Path):
        return False
    try:
        return quantised_reader(folder, config) is not None
    except ModelLoadError:  # what is wrong with the files is said elsewhere
        return False


def _weights(model: str, config: Any, place: torch.device) -> Iterator[Finding]:
    file, method = gguf_file(model), quant_method(config)
    if file is not None:
        yield Finding("file", "note", "GGUF, read as it is")
        yield from _store(model)
    package, ours = PACKAGES.get(method or ""), _read_as_stored(model, config, place)
    if ours:
        yield Finding("quantised", "note", f"{method}: run as stored, without its package")
    if method is not None and not ours and package is not None and importlib.util.find_spec(package) is None:
        said = f"weights in {method} need another package: pip install {DISTRIBUTIONS.get(package, package)}"
        yield Finding("quantised", "no", said, needed=True)
    if file is not None:
        yield Finding("weights", "yes", "every tensor lies in the file", needed=True)  # or the config was refused
        return
    found = find_source(model)
    source = found.place
    if found.adapter is not None and ours:
        yield Finding("adapter", "no", str(unmergeable(found.adapter, method)), needed=True)
    elif found.adapter is not None:
        yield Finding("adapter", "note", f"an adapter for {source}, merged into its weights when it is loaded")
    if not isinstance(source, Path):
        yield Finding("weights", "note", "on the hub; their files are checked once they are downloaded")
        return
    faults = faults_of(source, config)
    for fault in faults:
        yield Finding("weights", "no", fault, needed=True)
    if not faults:
        yield Finding("weights", "yes", "the files are complete, and have the layers of the config", needed=True)


def _store(model: str) -> Iterator[Finding]:
    """What another program keeps with the file, and what of it has no effect."""
    stored = stored_model(model)
    if stored is None:
        return
    yield Finding("store", "note", str(stored.file))
    if stored.system:
        yield Finding("system", "note", f"conversations without a system message get {shown(stored.system)}")
    if stored.template:
        yield Finding("store", "note", "its Go template is not read: the file's own template counts, or chat_template=")
    for note in stored.notes:
        yield Finding("store", "note", note)


def _kinds(kinds: list[KindInUse], place: torch.device) -> Iterator[Finding]:
    """Each type of tensors in a GGUF file, and how it runs."""
    for one in kinds:
        stored = f"{one.count} tensors of {one.stored / GIGABYTE:.3f} GB"
        how = "run as stored" if one.as_stored else f"ordinary weights of {one.held / GIGABYTE:.3f} GB on {place}"
        yield Finding(f"type {one.kind}", "note", f"{stored}: {how}")


def _layers(config: Any) -> Iterator[Finding]:
    text = config.get_text_config()
    kinds = get_layer_types_and_kwargs(text)[0]
    try:
        auto_class(config)
        check_loadable(config)
        layers = ", ".join(f"{number} × {kind}" for kind, number in Counter(kinds).items())
        layers = "an encoder-decoder model" if config.is_encoder_decoder else layers
        yield Finding("attention", "yes", f"{config.model_type}: {layers}", needed=True)
    except UnsupportedError as error:
        yield Finding("attention", "no", str(error), needed=True)
    if RECURRENT.intersection(kinds):
        yield Finding("states", "note", "recurrent states follow every path; bitwise and cuda_graphs are refused")
    if INDEXED.intersection(kinds):
        yield Finding("indexers", "note", "indexers choose along every path; bitwise and cuda_graphs are refused")
    if (why := why_only_chains(text)) is not None:
        yield Finding("trees", "note", f"it {why}: drafts are single paths")
    for kind in draft_kinds():
        if (says := kind.recognises(None, text)) is not None:
            yield Finding(kind.name, "note", says)


def _context(config: Any) -> Iterator[Finding]:
    length = context_length(config.get_text_config(decoder=config.is_encoder_decoder or None))
    if length != UNLIMITED:
        both = "the prompt, and as many for the answer" if config.is_encoder_decoder else "prompt and answer together"
        yield Finding("context", "yes", f"{length:,} tokens for {both}")


def _memory(config: Any, place: torch.device, held: int | None) -> Iterator[Finding]:
    """Whether the weights fit, and how many tokens beside them; `held` are their bytes where the file says them."""
    method = quant_method(config)
    free, dense = free_bytes(place), method is None or _loads_dense(method, place)
    weights = held or (_weight_bytes(config) if dense else None)
    if weights is None:
        why = "the config does not tell how large the weights are" if dense else f"weights packed by {method}"
        yield Finding("memory", "note", why)
        return
    if method is not None:
        said = f"stored in {method}, and dequantised on {place}: {weights / GIGABYTE:.2f} GB in memory"
        yield Finding("quantised", "note", said)
    said = f"weights {weights / GIGABYTE:.2f} GB, {free / GIGABYTE:.2f} GB free on {place}"
    if weights > free:
        yield Finding("memory", "no", f"{said}: use a smaller or a quantised model", needed=True)
        return
    if per_token := bytes_per_token(config):
        room = int((free - weights) / 2 / per_token)
        said = f"{said}; {per_token / 1024:.0f} KiB per token, about {room:,} tokens fit"
    yield Finding("memory", "yes", said, needed=True)


def _weight_bytes(config: Any) -> int | None:
    try:
        with torch.device("meta"):
            model = auto_class(config).from_config(config)
    except Exception:  # an architecture may raise anything for a config it refuses
        return None
    return int(sum(parameter.numel() for parameter in model.parameters())) * _itemsize(config)


def _itemsize(config: Any) -> int:
    dtype: torch.dtype = getattr(config, "dtype", None) or torch.float32
    return int(dtype.itemsize)


def bytes_per_token(config: Any) -> int | None:
    """Bytes of keys and values; None for an encoder-decoder model, whose prompt and answer take different ones."""
    text = config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or getattr(text, "num_attention_heads", None)
    if config.is_encoder_decoder or not heads or not getattr(text, "num_hidden_layers", None):
        return None
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = sum(kind in WITH_KEYS for kind in get_layer_types_and_kwargs(text)[0])
    return 2 * layers * int(heads) * int(width) * _itemsize(config)


def _template(tokenizer: PreTrainedTokenizerBase, *, given: bool) -> Finding:
    try:
        render_prompt(tokenizer, [USER])
    except PrecedentError as error:
        if tokenizer.chat_template:
            return Finding("chat template", "no", str(error), needed=True)
        supply = f"give chat_template=, one of {', '.join(templates.FAMILIES)} or your own, or use PrecedentLLM"
        return Finding("chat template", "no", f"none: a base model, which refuses conversations; {supply}")
    if not tokenizer.chat_template:
        return Finding("chat template", "note", "none: a base model, not trained to chat; ChatML is used")
    return Finding("chat template", "yes", "the given one" if given else "the model's own", needed=True)


def _tools(tokenizer: PreTrainedTokenizerBase) -> Finding:
    try:
        prompt_ids = render_prompt(tokenizer, [USER], [TOOL])
        form = answer_syntax(tokenizer, [USER], [TOOL], prompt_ids).form
    except PrecedentError as error:
        return Finding("tools", "no", str(error))
    own = "tools" in str(tokenizer.chat_template or "")
    said = "the model's own template" if own else "the shipped template (the model was not trained on it)"
    return Finding("tools", "yes", f"{said}; calls in the format {form.name if form else 'of its response template'}")


def _ends(model: str, config: Any, tokenizer: PreTrainedTokenizerBase) -> Finding:
    file = gguf_file(model)
    configured = end_tokens_in(read_header(file)) if file else configured_ends(config, load_generation_config(model))
    found = [f"{one.text} ({one.token_id}: {', '.join(one.sources)})" for one in end_tokens(tokenizer, configured)]
    if not found:
        said = "none is known, so every answer runs to max_tokens: give stop= or stop_token_ids="
        return Finding("end tokens", "no", said)
    return Finding("end tokens", "yes", "; ".join(found))


def _sampling(model: str) -> Finding:
    found = sampling_defaults(load_generation_config(model))
    said = f"the checkpoint recommends {shown_settings(found)}"
    if samples_as_recommended(model, None):
        return Finding("sampling", "note", f"{said}; applied under this name, unless sampling='precedent'")
    said += "; answers are greedy unless you ask otherwise"
    return Finding("sampling", "note", f"{said}: sampling='model' applies it" if found else said)


def _grammar(tokenizer: PreTrainedTokenizerBase) -> Finding:
    if not is_installed():
        said = "llguidance is missing: pip install 'precedent-llm[grammar]'"
    elif not tokenizer.is_fast:
        said = "grammars need a fast tokenizer, and this one is slow"
    else:
        return Finding("structured output", "yes", "forced tool calls, schemas and JSON, by grammar")
    return Finding("structured output", "no", said)


def _draft(draft_model: str | None, tokenizer: PreTrainedTokenizerBase, config: Any) -> Finding:
    number = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if draft_model is None:
        said = f"none given: use a smaller model with the same tokenizer, or {FIRST_LAYERS}N"
        return Finding("draft model", "note", said)
    try:
        if draft_model.startswith(FIRST_LAYERS):
            chosen = checked_count(draft_model, number)
            return Finding("draft model", "yes", f"the target's own first layers, {chosen} of {number}")
        source = None if gguf_file(draft_model) is not None else find_source(draft_model).place
        for kind in () if source is None else draft_kinds():
            says = kind.recognises(source, config.get_text_config())
            if says is not None:
                return Finding("draft model", "note", says)
        if source is not None:
            check_readable(source)
        check_loadable(load_config(draft_model))
        check_same_vocabulary(draft_model, load_tokenizer(draft_model), tokenizer)
    except PrecedentError as error:
        return Finding("draft model", "no", str(error), needed=True)
    return Finding("draft model", "yes", "it has the target's tokenizer")
