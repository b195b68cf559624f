"""Models of every tool format: small tokenizers, and chat templates after the public ones."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase

from precedent_testing.scripted_engine import chatml_tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look up an order.",
            "parameters": {
                "type": "object",
                "properties": {"number": {"type": "string"}, "copies": {"type": "integer"}},
            },
        },
    }
]
ARGUMENTS = {"number": "10 €", "copies": 2}

QWEN3 = """
{%- if tools %}{{ '<|im_start|>system\\n# Tools\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' + (tool | tojson) }}{% endfor %}
{{- '\\n</tools>\\nReturn <tool_call>\\n{"name": <function-name>, "arguments": <args-json-object>}\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}
    {%- set is_result = m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>') %}
    {%- if m.role == 'user' and not is_result %}
        {%- set ns.last = loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set content = m.content %}{% set thoughts = m.reasoning_content or '' %}
        {%- if '</think>' in content %}
            {%- set thoughts = content.split('</think>')[0].split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last %}{{- '<think>\\n' + thoughts.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n' if content or not loop.first }}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- else %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""
QWEN3_CODER = """
{%- if tools %}{{ '<|im_start|>system\\n' }}{% for tool in tools %}{{ (tool | tojson) + '\\n' }}{% endfor %}
{{- 'Reply <tool_call>\\n<function=name>\\n<parameter=key>\\nvalue\\n</parameter>\\n</function>\\n</tool_call>' }}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n' if m.content or not loop.first }}{{ '<tool_call>\\n<function=' + call.function.name + '>\\n' }}
            {%- for key, value in call.function.arguments | items %}
                {{- '<parameter=' + key + '>\\n' + (value if value is string else value | tojson) }}
                {{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<|im_start|>assistant\\n' if add_generation_prompt }}"""
LLAMA = """
{%- if tools %}{{ '<|start_header_id|>system<|end_header_id|>\\n\\nEnvironment: ipython\\nRespond in the format ' }}
{{- '{"name": function name, "parameters": dictionary of argument name and its value}\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
    {%- if m.tool_calls %}
        {%- if m.tool_calls | length != 1 %}{{ raise_exception('Only single tool-calls at once!') }}{% endif %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + m.tool_calls[0].function.name + '", ' }}
        {{- '"parameters": ' }}{{ m.tool_calls[0].function.arguments | tojson }}{{ '}<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' }}
        {{- m.content + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt }}"""
LLAMA_PYTHONIC = """
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' }}
    {%- if loop.first and tools %}{{ 'Reply [func_name1(params_name1=value1)]\\n' + (tools | tojson) }}{% endif %}
    {{- m.content }}
    {%- if m.tool_calls %}{{ '[' }}{% for call in m.tool_calls %}{{ call.function.name + '(' }}
        {%- for key, value in call.function.arguments | items %}
            {{- key + '=' + (value | tojson) + (', ' if not loop.last else '') }}
        {%- endfor %}{{ ')' + (', ' if not loop.last else ']') }}{% endfor %}{% endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' if add_generation_prompt }}"""
MISTRAL = """
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.first %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.tool_calls %}
        {{- '[TOOL_CALLS][' }}
        {%- for call in m.tool_calls %}
            {%- if call.id | length != 9 %}{{ raise_exception('Tool call IDs should be of length 9!') }}{% endif %}
            {{- (call.function | tojson)[:-1] + ', "id": "' + call.id + '"}' + (', ' if not loop.last else ']</s>') }}
        {%- endfor %}
    {%- elif m.role == 'tool' %}
        {%- if m.tool_call_id | length != 9 %}{{ raise_exception('Tool call IDs should be of length 9!') }}{% endif %}
        {{- '[TOOL_RESULTS]{"content": ' + m.content + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
    {%- else %}{{- m.content + '</s>' }}
    {%- endif %}
{%- endfor %}"""
MISTRAL_ARGS = """
{%- for m in messages %}
    {%- if m.role == 'user' %}
        {%- if tools and loop.first %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
        {{- '[INST]' + m.content + '[/INST]' }}
    {%- elif m.role == 'assistant' %}
        {%- if m.reasoning_content %}{{ '[THINK]' + m.reasoning_content + '[/THINK]' }}{% endif %}{{ m.content }}
        {%- for call in m.tool_calls or [] %}
            {{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson) }}
        {%- endfor %}{{ '</s>' }}
    {%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
    {%- endif %}
{%- endfor %}"""
GEMMA = """
{%- macro written(value) %}
    {%- if value is string %}{{ QUOTE + value + QUOTE }}{% else %}{{ value | tojson }}{% endif %}
{%- endmacro %}
{%- if tools %}{{ '<start_of_turn>developer\\n' + (tools | tojson) + '<end_of_turn>\\n' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{{ RESPONSE + m.content + '<end_of_turn>\\n' }}
    {%- else %}
        {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content }}
        {%- for call in m.tool_calls or [] %}{{ OPEN + 'call:' + call.function.name + '{' }}
            {%- for key, value in call.function.arguments | items %}
                {{- key + ':' + written(value) + (',' if not loop.last else '') }}
            {%- endfor %}{{ '}' + CLOSE }}
        {%- endfor %}
        {{- '<end_of_turn>\\n' }}
    {%- endif %}
{%- endfor %}
{{- '<start_of_turn>model\\n' if add_generation_prompt }}"""
TOOL_CODE = """
{%- if tools %}{{ 'Call functions in a block ```tool_code\\n' + (tools | tojson) + '\\n' }}{% endif %}
{%- for m in messages %}
    {{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' }}
    {{- '```tool_output\\n' if m.role == 'tool' }}{{ m.content }}
    {%- for call in m.tool_calls or [] %}
        {{- ('\\n' if m.content else '') + '```tool_code\\n' if loop.first else '\\n' }}{{ call.function.name + '(' }}
        {%- for key, value in call.function.arguments | items %}
            {{- key + '=' + (value | tojson) + (', ' if not loop.last else '') }}
        {%- endfor %}{{ ')' + ('\\n```' if loop.last else '') }}
    {%- endfor %}{{ '<end_of_turn>\\n' }}
{%- endfor %}
{{- '<start_of_turn>model\\n' if add_generation_prompt }}"""
HARMONY = """
{{- '<|start|>system<|message|>Valid channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}{{ '<|start|>developer<|message|>to=functions ' + (tools | tojson) + '<|end|>' }}{% endif %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.tool_calls %}
        {%- if m.content and m.thinking %}{{ raise_exception('Cannot pass both content and thinking!') }}{% endif %}
        {%- set thoughts = m.content or m.thinking %}
        {%- if thoughts %}{{ '<|start|>assistant<|channel|>analysis<|message|>' + thoughts + '<|end|>' }}{% endif %}
        {{- '<|start|>assistant<|channel|>commentary to=functions.' + m.tool_calls[0].function.name }}
        {{- ' <|constrain|>json<|message|>' + (m.tool_calls[0].function.arguments | tojson) + '<|call|>' }}
    {%- elif m.role == 'assistant' %}{{ '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' }}
    {%- elif m.role == 'tool' %}
        {{- '<|start|>functions to=assistant<|channel|>commentary<|message|>' + m.content + '<|end|>' }}
    {%- else %}{{- '<|start|>' + m.role + '<|message|>' + m.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- '<|start|>assistant' if add_generation_prompt }}"""


def gemma(open_tag: str, close_tag: str, quote: str, response: str) -> str:
    """Gemma's template with one generation's tags."""
    tags = {"OPEN": open_tag, "CLOSE": close_tag, "QUOTE": quote, "RESPONSE": response}
    return "".join(f"{{%- set {name} = {tag!r} %}}" for name, tag in tags.items()) + GEMMA


@dataclass(frozen=True)
class Model:
    """A family: its template, its special tokens (the first ends an answer), and answers as its models write them.

    `call` is a call with ARGUMENTS, `thinks` and `says` what comes before it, `between` stands between two calls (None
    where an answer has one only), `cut` is how much of the call is lacking when it was cut off. `round_trip` says
    whether the template writes calls as the model does.
    """

    template: str
    special: tuple[str, ...]
    call: str
    thinks: str = ""
    says: str = "I look."
    between: str | None = "\n"
    before_call: str = "\n"
    round_trip: bool = True
    cut: int = 12


JSON = json.dumps(ARGUMENTS, ensure_ascii=False)
MODELS = {
    "hermes": Model(
        QWEN3, ("<|im_end|>", "<|im_start|>"), f'<tool_call>\n{{"name": "look_up", "arguments": {JSON}}}\n</tool_call>',
        thinks="<think>\nHm.\n</think>\n\n", cut=30),
    "qwen3-coder": Model(
        QWEN3_CODER, ("<|im_end|>", "<|im_start|>"),
        "<tool_call>\n<function=look_up>\n<parameter=number>\n10 €\n</parameter>\n<parameter=copies>\n2\n</parameter>\n"
        "</function>\n</tool_call>", cut=40),
    "llama-json": Model(
        LLAMA, ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        f'{{"name": "look_up", "parameters": {JSON}}}', says="", between=None),
    "llama-pythonic": Model(
        LLAMA_PYTHONIC, ("<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>"),
        '[look_up(number="10 €", copies=2)]', says="", between=None),
    "mistral": Model(
        MISTRAL, ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
        f'[TOOL_CALLS][{{"name": "look_up", "arguments": {JSON}}}]', says="", between=None, round_trip=False),
    "mistral-args": Model(
        MISTRAL_ARGS, ("</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[TOOL_RESULTS]"),
        f"[TOOL_CALLS]look_up[ARGS]{JSON}", thinks="[THINK]Hm.[/THINK]", between="", before_call=""),
    "function-gemma": Model(
        gemma("<start_function_call>", "<end_function_call>", "<escape>", "<start_function_response>"),
        ("<end_of_turn>", "<start_of_turn>", "<start_function_call>", "<end_function_call>", "<escape>"),
        "<start_function_call>call:look_up{number:<escape>10 €<escape>,copies:2}<end_function_call>",
        between="", before_call="", cut=40),
    "gemma4": Model(
        gemma("<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"),
        ("<end_of_turn>", "<start_of_turn>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        '<|tool_call>call:look_up{number:<|"|>10 €<|"|>,copies:2}<tool_call|>', between="", before_call="", cut=30),
    "tool-code": Model(
        TOOL_CODE, ("<end_of_turn>", "<start_of_turn>"), '```tool_code\nlook_up(number="10 €", copies=2)\n```',
        between=None),
    "harmony": Model(
        HARMONY, ("<|call|>", "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|return|>"),
        f"<|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{JSON}",
        thinks="<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant", says="", between=None),
}  # fmt: skip


def tokenizer_of(model: Model) -> PreTrainedTokenizerBase:
    """One token for each byte and for each special token."""
    tokenizer = chatml_tokenizer(chat_template=model.template)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in model.special], special_tokens=True)
    tokenizer.eos_token = model.special[0]
    return tokenizer


TOKENIZERS = {name: tokenizer_of(model) for name, model in MODELS.items()}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


def answers_of(model: Model) -> list[str]:
    """What such models write: thoughts, text and calls; one call broken off."""
    before = f"{model.says}{model.before_call}" if model.says else ""
    answers = [f"{model.thinks}{before}{model.call}", model.call[: -model.cut]]
    if model.between is not None:
        answers.append(f"{model.thinks}{model.call}{model.between}{model.call}")
    return answers
