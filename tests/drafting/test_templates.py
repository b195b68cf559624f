"""Premade responses as their users write them, and the forms of tool calls."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count, repeat

import pytest
from helpers.answer_parts import whole_parts

from precedent.errors import ConfigError
from precedent.text.templates import Hole, Template, Templates, tool_templates
from precedent.text.tool_formats.calls import ParsedCall
from precedent.text.tool_formats.formats import HERMES
from precedent.text.tool_formats.parser import TaggedParser


def test_a_text_is_read_as_literals_and_holes() -> None:
    template = Template.parse("Document {document_id} is {state}.", {"state": ["open", "deleted"]})
    assert template.parts == (
        "Document ", Hole("document_id"), " is ", Hole("state", choices=("open", "deleted")), "."
    )  # fmt: skip


@pytest.mark.parametrize("text", ["Hello.", "{a} is {b}", "set {{{a}}} and {{}}", "{a}}}"])
def test_a_template_is_written_as_it_was_read(text: str) -> None:
    template = Template.parse(text)
    assert template.text == text
    assert Template.parse(template.text) == template


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{name}", "no text of its own"),
        ("  ", "no text of its own"),
        ("Hello {first}{last}", "nothing between the holes 'first' and 'last'"),
        ("Hello {}", "not a plain name"),
        ("Hello {0}", "not a plain name"),
        ("Hello {name!r}", "not a plain name"),
        ("Hello {name:>10}", "not a plain name"),
        ("Hello {user.name}", "not a plain name"),
        ('{"name": 1}', "not a plain name"),
        ("Hello {name", "cannot be read"),
        ("Hello }", "cannot be read"),
    ],
)
def test_a_template_that_cannot_be_meant_is_refused_by_its_text(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as refused:
        Template.parse(text)
    assert repr(text) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_templates_are_a_checked_sequence() -> None:
    templates = Templates(["Hello {name}.", Template.parse("Bye.")])
    assert [template.text for template in templates] == ["Hello {name}.", "Bye."]
    assert templates[1].holes == ()
    with pytest.raises(ConfigError, match="given twice"):
        Templates(["Hello {name}.", "Hello {name}."])
    with pytest.raises(ConfigError, match=r"'nme', which no template has as a hole \(holes: name\)"):
        Templates(["Hello {name}."], choices={"nme": ["Ada"]})
    with pytest.raises(ConfigError, match="is one text"):
        Templates("Hello {name}.")
    with pytest.raises(ConfigError, match="neither a text nor a Template"):
        Templates([7])  # type: ignore[list-item]
    with pytest.raises(ConfigError, match="empty choice"):
        Templates(["Hello {name}."], choices={"name": ["Ada", ""]})


def tool(
    name: str, properties: dict[str, object], required: list[str] | None = None, **more: object
) -> dict[str, object]:
    """An OpenAI function dict."""
    schema = {"type": "object", "properties": properties, "required": required or list(properties), **more}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def filled(template: Template, **values: str) -> ParsedCall:
    """The call that a template becomes with these texts in its holes."""
    text = "".join(part if isinstance(part, str) else values[part.name] for part in template.parts)
    assert text.startswith("<tool_call>\n")
    assert text.endswith("\n</tool_call>")
    (call,) = whole_parts(TaggedParser(HERMES).push(text))
    assert isinstance(call, ParsedCall)
    return call


def test_every_kind_of_argument_becomes_valid_json() -> None:
    properties = {
        "title": {"type": "string"},
        "pages": {"type": "integer"},
        "state": {"enum": ["open", 7, None]},
        "public": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "style": {"type": "object"},
        "anything": {},
    }
    (template,) = tool_templates([tool("edit", properties)])
    kinds = {hole.name: (hole.kind, hole.choices) for hole in template.holes}
    assert kinds["title"] == ("string", ())
    assert kinds["pages"] == ("number", ())
    assert kinds["state"] == ("json", ('"open"', "7", "null"))
    assert kinds["public"] == ("json", ("true", "false"))
    call = filled(template, title="A", pages="3", state="7", public="true", tags="x", style='"b": 1', anything="{}")
    assert call.arguments == {
        "title": "A", "pages": 3, "state": 7, "public": True, "tags": ["x"], "style": {"b": 1}, "anything": {}
    }  # fmt: skip


@pytest.mark.parametrize(
    "endless", [repeat("It is on its way."), count(), range(10**13)], ids=["texts", "numbers", "range"]
)
def test_templates_without_end_are_refused(endless: Iterable[str]) -> None:
    """They are read up to a bound: nobody's memory is filled."""
    with pytest.raises(ConfigError, match="at most 1,024 are allowed"):
        Templates(endless)
