"""The built-in tool formats, most specific first: the first that matches a chat template is used."""

from __future__ import annotations

from precedent.text.tool_formats import harmony
from precedent.text.tool_formats.calls import CallReader
from precedent.text.tool_formats.description import ToolFormat, Tools
from precedent.text.tool_formats.gemma_calls import GemmaCall
from precedent.text.tool_formats.json_calls import BareCall, JsonCall
from precedent.text.tool_formats.mistral_calls import MistralCalls
from precedent.text.tool_formats.python_calls import PythonCalls
from precedent.text.tool_formats.xml_calls import XmlCall

_LLAMA_KEYS = ("parameters", "arguments")


def tagged_json(form: ToolFormat, tools: Tools) -> CallReader:
    """Reads one JSON object between the format's tags."""
    return JsonCall(form.tag, open_tag=form.tag, close_tags=(form.call_close.strip(),))


def _llama_json(form: ToolFormat, tools: Tools) -> CallReader:
    return JsonCall(form.tag, argument_keys=_LLAMA_KEYS)


def _bare_llama_json(form: ToolFormat, tools: Tools) -> CallReader:
    return BareCall("", argument_keys=_LLAMA_KEYS)


def _python_list(form: ToolFormat, tools: Tools) -> CallReader:
    return PythonCalls(form.tag, form.list_close.strip())


def _bare_python_list(form: ToolFormat, tools: Tools) -> CallReader:
    return PythonCalls("", form.list_close.strip(), bare=True)


def _mistral(form: ToolFormat, tools: Tools) -> CallReader:
    return MistralCalls(form.tag)


def _xml(form: ToolFormat, tools: Tools) -> CallReader:
    return XmlCall(form.tag, tools)


def _function_gemma(form: ToolFormat, tools: Tools) -> CallReader:
    return GemmaCall(form.tag, "<escape>", form.call_close)


def _gemma4(form: ToolFormat, tools: Tools) -> CallReader:
    return GemmaCall(form.tag, '<|"|>', form.call_close)


QWEN3_CODER = ToolFormat(
    name="qwen3-coder",
    models="Qwen3-Coder, Qwen 3.5",
    known_by=("<function=", "<parameter="),
    reader=_xml,
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
    reader=_python_list,
    tag="<|python_start|>",
    bare_start="[",
    bare_reader=_bare_python_list,
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
    reader=_llama_json,
    tag="<|python_tag|>",
    bare_start="{",
    bare_reader=_bare_llama_json,
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
    reader=_mistral,
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
    reader=_mistral,
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
    reader=_function_gemma,
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
    reader=_gemma4,
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
    reader=_python_list,
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
    tags=harmony.TAGS,
    one_call_per_turn=True,
    reasoning_key="thinking",
)
BUILTIN = (
    *(HARMONY, GEMMA4, FUNCTION_GEMMA, QWEN3_CODER, HERMES),
    *(MISTRAL_ARGS, MISTRAL, LLAMA_PYTHONIC, LLAMA_JSON, TOOL_CODE),
)
