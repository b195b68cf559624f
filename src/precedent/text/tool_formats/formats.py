"""Tool formats as data: how model families write tool calls and reasoning, and whose chat template writes which."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from precedent.errors import ConfigError
from precedent.text.tool_formats.calls import CallReader, Tools
from precedent.text.tool_formats.json_calls import BareCall, JsonCall, MistralCalls
from precedent.text.tool_formats.pair_calls import GemmaCall, PythonCalls, XmlCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

GROUP = "precedent.tool_formats"
"""Entry points that name a `ToolFormat`."""

Reader = Callable[["ToolFormat", Tools], CallReader]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A model family's way of writing tool calls.

    Writing: a call is `call_open`, the call itself, `call_close`. `separator` precedes a call that follows text and
    separates two calls (`between` overrides the latter); `list_open` and `list_close` enclose all calls of an answer.
    With `name_key` the call itself is a JSON object with the name and, under `arguments_key`, the arguments; without
    it, the call is the name, `name_close`, and the arguments. `arguments` is their syntax: "json", "xml", "python" or
    "gemma".

    Reading: `tag` opens a call anywhere, and `reader` creates the reader for the rest of it. `bare_start` is a
    character that opens a call at the beginning of an answer, for `bare_reader`. A format with `channels` (gpt-oss)
    sorts the whole answer into messages instead. `tags` are the texts that mean something to the format or its
    template; in messages of users and tools they are plain text.

    Recognising: a chat template is in this format if it contains every text of `known_by` and none of `not_by`.

    Templates: `id_length` is the length of call ids that the template requires, `one_call_per_turn` says that it shows
    only one call per turn, `reasoning_key` is the message key from which it reads reasoning.
    """

    name: str
    models: str
    known_by: tuple[str, ...]
    reader: Reader | None
    not_by: tuple[str, ...] = ()
    call_open: str = ""
    call_close: str = ""
    separator: str = ""
    between: str | None = None
    list_open: str = ""
    list_close: str = ""
    name_key: str | None = None
    arguments_key: str = "arguments"
    name_close: str = ""
    arguments: str = "json"
    tag: str = ""
    bare_start: str = ""
    bare_reader: Reader | None = None
    tags: tuple[str, ...] = ()
    channels: bool = False
    id_length: int | None = None
    one_call_per_turn: bool = False
    reasoning_key: str = "reasoning_content"

    def wrote(self, template: str) -> bool:
        """Return whether a chat template writes calls in this format."""
        return all(text in template for text in self.known_by) and not any(text in template for text in self.not_by)

    def around_arguments(self, name: str) -> tuple[str, str]:
        """The text before and after the arguments in an answer that is one call of `name`."""
        if self.name_key is None:
            before, after = f"{name}{self.name_close}", ""
        else:
            before = f"{{{_json(self.name_key)}: {_json(name)}, {_json(self.arguments_key)}: "
            after = "}"
        return f"{self.list_open}{self.call_open}{before}", f"{after}{self.call_close}{self.list_close}"


def _json(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def tagged_json(form: ToolFormat, tools: Tools) -> CallReader:
    """Create a reader of one JSON object between the format's tags."""
    return JsonCall(form.tag, open_tag=form.tag, close_tags=(form.call_close.strip(),))


_LLAMA_KEYS = ("parameters", "arguments")

QWEN3_CODER = ToolFormat(
    name="qwen3-coder",
    models="Qwen3-Coder, Qwen 3.5",
    known_by=("<function=", "<parameter="),
    reader=lambda form, tools: XmlCall(form.tag, tools),
    tag="<tool_call>",
    call_open="<tool_call>\n<function=",
    name_close=">\n",
    arguments="xml",
    call_close="</function>\n</tool_call>",
    separator="\n",
    tags=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
HERMES = ToolFormat(
    name="hermes",
    models="Hermes 2 and 3, Qwen 2.5, Qwen 3, SmolLM3",
    known_by=("<tool_call>",),
    not_by=("<function=", "<arg_key>"),
    reader=tagged_json,
    tag="<tool_call>",
    call_open="<tool_call>\n",
    name_key="name",
    call_close="\n</tool_call>",
    separator="\n",
    tags=("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"),
)
LLAMA_PYTHONIC = ToolFormat(
    name="llama-pythonic",
    models="Llama 3.2 and Llama 4 with a pythonic template",
    known_by=("[func_name1(",),
    reader=lambda form, tools: PythonCalls(form.tag, form.list_close.strip()),
    tag="<|python_start|>",
    bare_start="[",
    bare_reader=lambda form, tools: PythonCalls("", form.list_close.strip(), bare=True),
    list_open="[",
    name_close="(",
    arguments="python",
    call_close=")",
    between=", ",
    list_close="]",
    tags=("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
)
LLAMA_JSON = ToolFormat(
    name="llama-json",
    models="Llama 3.1, 3.2 and 3.3",
    known_by=('"parameters": ', "<|eot_id|>"),
    reader=lambda form, tools: JsonCall(form.tag, argument_keys=_LLAMA_KEYS),
    tag="<|python_tag|>",
    bare_start="{",
    bare_reader=lambda form, tools: BareCall("", argument_keys=_LLAMA_KEYS),
    name_key="name",
    arguments_key="parameters",
    between="; ",
    tags=("<|python_tag|>",),
    one_call_per_turn=True,
)
MISTRAL = ToolFormat(
    name="mistral",
    models="Mistral 7B v0.3, Nemo, Small 3.0, Large 2 (template with [ARGS]: the later generation)",
    known_by=("[TOOL_CALLS]",),
    not_by=("[ARGS]",),
    reader=lambda form, tools: MistralCalls(form.tag),
    tag="[TOOL_CALLS]",
    list_open="[TOOL_CALLS][",
    name_key="name",
    between=", ",
    list_close="]",
    tags=("[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    id_length=9,
)
MISTRAL_ARGS = ToolFormat(
    name="mistral-args",
    models="Mistral Small 3.1 and later, Magistral, Devstral, Ministral 3",
    known_by=("[TOOL_CALLS]", "[ARGS]"),
    reader=lambda form, tools: MistralCalls(form.tag),
    tag="[TOOL_CALLS]",
    call_open="[TOOL_CALLS]",
    name_close="[ARGS]",
    tags=(*MISTRAL.tags, "[ARGS]", "[CALL_ID]"),
    id_length=9,
)
FUNCTION_GEMMA = ToolFormat(
    name="function-gemma",
    models="FunctionGemma",
    known_by=("<start_function_call>",),
    reader=lambda form, tools: GemmaCall(form.tag, "<escape>", form.call_close),
    tag="<start_function_call>",
    call_open="<start_function_call>call:",
    arguments="gemma",
    call_close="<end_function_call>",
    tags=("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"),
)
GEMMA4 = ToolFormat(
    name="gemma4",
    models="Gemma 4",
    known_by=("<|tool_call>",),
    reader=lambda form, tools: GemmaCall(form.tag, '<|"|>', form.call_close),
    tag="<|tool_call>",
    call_open="<|tool_call>call:",
    arguments="gemma",
    call_close="<tool_call|>",
    tags=("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>", "<tool_response|>"),
)
TOOL_CODE = ToolFormat(
    name="tool-code",
    models="Gemma 2 and 3 with a tool_code template",
    known_by=("```tool_code",),
    reader=lambda form, tools: PythonCalls(form.tag, form.list_close.strip()),
    tag="```tool_code",
    list_open="```tool_code\n",
    name_close="(",
    arguments="python",
    call_close=")",
    separator="\n",
    list_close="\n```",
    tags=("```tool_code", "```tool_output"),
)
HARMONY = ToolFormat(
    name="harmony",
    models="gpt-oss",
    known_by=("<|channel|>", "to=functions"),
    reader=None,
    channels=True,
    call_open="<|channel|>commentary to=functions.",
    name_close=" <|constrain|>json<|message|>",
    call_close="<|call|>",
    tags=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"),
    one_call_per_turn=True,
    reasoning_key="thinking",
)
BUILTIN = (
    *(HARMONY, GEMMA4, FUNCTION_GEMMA, QWEN3_CODER, HERMES),
    *(MISTRAL_ARGS, MISTRAL, LLAMA_PYTHONIC, LLAMA_JSON, TOOL_CODE),
)
"""Most specific first: the first that matches a chat template is used."""


@lru_cache(maxsize=1)
def known_formats() -> tuple[ToolFormat, ...]:
    """All formats, those of other packages first. Raises ConfigError for an entry point that is not a `ToolFormat`."""
    return (*map(_loaded, sorted(entry_points(group=GROUP), key=lambda point: point.name)), *BUILTIN)


def format_of_template(template: str) -> ToolFormat | None:
    """The format in which a chat template writes calls, None if unknown."""
    return next((form for form in known_formats() if form.wrote(template)), None)


def _loaded(point: EntryPoint) -> ToolFormat:
    form = point.load()
    if not isinstance(form, ToolFormat):
        raise ConfigError(f"the entry point {point.name!r} of {GROUP} must name a ToolFormat, not {form!r}")
    return form


@dataclass(frozen=True, slots=True)
class ReasoningTags:
    """The tags around a model's reasoning."""

    open: str
    close: str


REASONING = (
    ReasoningTags("<think>", "</think>"),
    ReasoningTags("[THINK]", "[/THINK]"),
    ReasoningTags("<|channel>thought\n", "<channel|>"),
)
"""Qwen 3, DeepSeek-R1 and SmolLM3; Magistral; Gemma 4."""


def reasoning_tags(tokenizer: PreTrainedTokenizerBase, template: str) -> ReasoningTags | None:
    """Find the reasoning tags in the chat template or among the tokenizer's added tokens; None if there are none."""
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    return next((tags for tags in REASONING if tags.close in template or tags.close in added), None)
