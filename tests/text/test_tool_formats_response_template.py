"""Response templates of transformers serve formats that we do not know, and other packages bring formats."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from typing import Any

import pytest
from helpers.answer_parts import Part, events_in, whole_parts
from helpers.call_ids import numbered
from transformers import PreTrainedTokenizerBase

from precedent.errors import ConfigError
from precedent.langchain import ChatPrecedent
from precedent.text.tool_formats import InvalidCall, ReasoningPiece, TextPiece, ToolFormat
from precedent.text.tool_formats import formats as registry
from precedent.text.tool_formats.calls import ParsedCall
from precedent.text.tool_formats.formats import BUILTIN, HERMES, tagged_json
from precedent.text.tool_formats.parser import TaggedParser
from precedent.text.tool_formats.response_template import ResponseTemplateParser
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

FORMS = {form.name: form for form in BUILTIN}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "f",
            "parameters": {"type": "object", "properties": {"n": {"type": "integer"}, "t": {"type": "string"}}},
        },
    }
]
# Formats that are not known here

OWN = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<mull>", "close": "</mull>", "content": "text"},
        "tool_calls": {
            "repeats": True,
            "transform": {"type": "function", "function": "{content}"},
            **{"open": "<act>", "close": "</act>", "content": "json"},
        },
        "content": {"content": "text", "close": "<|im_end|>"},
    },
}
ACT = '<act>{"name": "f", "arguments": {"n": 1}}</act>'


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    template = (
        "{{ tools }}{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
        "{{ '<|im_start|>assistant\n' }}"
    )
    made = chatml_tokenizer(chat_template=template)
    made.response_template = OWN
    return made


def parts_of(tokenizer: PreTrainedTokenizerBase, pieces: list[str]) -> list[Part]:
    parser = ResponseTemplateParser(tokenizer, "<|im_start|>assistant\n", TOOLS)
    return whole_parts(events_in(parser, pieces))


@pytest.mark.parametrize(
    ("answer", "parts"),
    [
        (f"<mull> Hm.\n </mull>\n\nI look. \n{ACT}{ACT}", [
            ReasoningPiece("Hm."), TextPiece("I look."), ParsedCall("f", {"n": 1}), ParsedCall("f", {"n": 1})]),
        ("a  b", [TextPiece("a  b")]),
        ('<act>{"name": "f"}</act>', [ParsedCall("f", {})]),
    ],
)  # fmt: skip
def test_an_answer_and_its_parts(tokenizer: PreTrainedTokenizerBase, answer: str, parts: list[Part]) -> None:
    assert parts_of(tokenizer, [answer]) == parts_of(tokenizer, list(answer)) == parts


@pytest.mark.parametrize(
    "broken", ["<act>nonsense</act>", '<act>{"arguments": {}}</act>', "<act>[1]</act>", '<act>{"name": "f", "arg']
)
def test_what_transformers_cannot_read_is_an_invalid_call(tokenizer: PreTrainedTokenizerBase, broken: str) -> None:
    whole = parts_of(tokenizer, [f"Hi{broken}"])
    assert parts_of(tokenizer, list(f"Hi{broken}")) == whole
    text, invalid = whole
    assert text == TextPiece("Hi")
    assert isinstance(invalid, InvalidCall)
    assert "not a tool call" in invalid.error


def test_a_model_with_a_response_template_of_its_own_calls_tools(tokenizer: PreTrainedTokenizerBase) -> None:
    def message(max_burst: int) -> Any:
        engine = ScriptedEngine(tokenizer, [f"<mull>Hm.</mull>Look:{ACT}"], max_burst=max_burst)
        return ChatPrecedent.from_engine(engine).bind_tools(TOOLS).invoke("hi")

    slow, fast = message(1), message(50)
    assert (slow.content, slow.additional_kwargs) == ("Look:", {"reasoning_content": "Hm."})
    assert [(call["name"], call["args"]) for call in slow.tool_calls] == [("f", {"n": 1})]
    assert slow.usage_metadata["output_token_details"]["reasoning"] == len("<mull>Hm.</mull>")
    assert (fast.content, fast.additional_kwargs) == (slow.content, slow.additional_kwargs)
    assert numbered(fast.tool_calls) == numbered(slow.tool_calls)


def test_a_call_that_max_tokens_cuts_is_text(tokenizer: PreTrainedTokenizerBase) -> None:
    answer = f"<mull>Hm.</mull>Look:{ACT}"
    engine = ScriptedEngine(tokenizer, lambda prompt: answer)
    model = ChatPrecedent.from_engine(engine).bind_tools(TOOLS)
    for length in range(1, len(tokenizer.encode(answer))):
        message: Any = model.invoke("hi", max_tokens=length)
        assert message.response_metadata["finish_reason"] == "length"
        assert message.invalid_tool_calls == []
        assert [call["args"] for call in message.tool_calls] in ([], [{"n": 1}])
        if not message.tool_calls:
            assert answer[:length].replace("<act>", "").endswith(message.text)
    assert len(model.invoke("hi").tool_calls) == 1


# Formats that other packages bring


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Entry points as other packages would have them."""
    found: dict[str, Any] = {}

    def entry_points(*, group: str) -> list[Any]:
        assert group == "precedent.tool_formats"
        return [importlib.metadata.EntryPoint(name, value, group) for name, value in found.items()]

    monkeypatch.setattr(registry, "entry_points", entry_points)
    registry.known_formats.cache_clear()
    yield found
    registry.known_formats.cache_clear()


def test_another_packages_format_comes_first(installed: dict[str, Any]) -> None:
    assert registry.format_of_template("<tool_call>") is HERMES
    registry.known_formats.cache_clear()
    installed["other"] = "precedent.text.tool_formats.formats:GEMMA4"
    assert registry.known_formats()[0] is FORMS["gemma4"]


def test_an_entry_point_that_is_no_format_is_refused_by_name(installed: dict[str, Any]) -> None:
    installed["odd"] = "precedent.text.tool_formats.formats:tagged_json"
    with pytest.raises(ConfigError, match=r"'odd' of precedent\.tool_formats must name a ToolFormat"):
        registry.known_formats()


def test_a_format_of_json_between_tags_needs_no_program() -> None:
    act = ToolFormat(
        name="act",
        models="my models",
        known_by=("<act>",),
        reader=tagged_json,
        tag="<act>",
        call_open="<act>",
        name_key="name",
        call_close="</act>",
        tags=("<act>", "</act>"),
    )
    parts = whole_parts(events_in(TaggedParser(act), f"Hi{ACT}"))
    assert parts == [TextPiece("Hi"), ParsedCall("f", {"n": 1})]
    assert act.around_arguments("f") == ('<act>{"name": "f", "arguments": ', "}</act>")
    assert act.wrote("{{ '<act>' }}")
