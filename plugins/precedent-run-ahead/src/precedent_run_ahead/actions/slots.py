"""Where an argument came from, so that the same place in another conversation gives the argument there.

A source is a small JSON value. No value of a conversation is in it, but a literal that the tool's schema lists:

    {"said": "A9"}                                       something of that shape in a user's message, the latest
    {"result": "list_orders", "path": "orders[].order"}  a value in the tool's latest answer
    {"shown": "list_orders", "shape": "A9"}              the same where the answer is not JSON
    {"argument": "get_order", "name": "order"}           what the tool was last asked with
    {"literal": false}                                   a value that the schema lists
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from precedent_run_ahead.actions.live import Live, words

Source = dict[str, Any]
Schema = Mapping[str, Any]

WHOLE = "whole"
"""In place of a shape: the whole answer."""

ANY_KEY = "*"

MOST_SOURCES = 3
"""So many sources of one argument are kept, the most reliable first."""

EMAIL = "@"
"""The shape of an email address; every other shape is written in runs: `A` capitals, `a` small letters, `9` digits."""

_EMAIL = re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+")
_RUN = re.compile(r"[A-Z]+|[a-z]+|[0-9]+|[^A-Za-z0-9]")
_RUNS = {"A": "[A-Z]+", "a": "[a-z]+", "9": "[0-9]+"}
_SHAPE = re.compile(r"(?!.*(AA|aa|99))[Aa9_.@#+/-]{1,12}")


def shape_of(value: str) -> str | None:
    """The form of a value, as `A9` for W1042; None for one without a form of its own, such as plain words."""
    if _EMAIL.fullmatch(value):
        return EMAIL
    shape = "".join(
        "9" if run.isdigit() else "A" if run.isupper() else "a" if run.islower() else run for run in _RUN.findall(value)
    )
    return shape if "9" in shape and _SHAPE.fullmatch(shape) else None


def of_shape(shape: str, text: str) -> list[str]:
    """The values of a shape in a text, in order, each once; none for a text that is no shape."""
    if shape == EMAIL:
        pattern = _EMAIL
    elif _SHAPE.fullmatch(shape):
        pattern = re.compile(rf"(?<![\w#]){''.join(_RUNS.get(run) or re.escape(run) for run in shape)}(?!\w)")
    else:
        return []
    return list(dict.fromkeys(match.group().rstrip(".") for match in pattern.finditer(text)))


def sources_of(value: Any, tool: str, name: str, live: Live, schema: Schema) -> list[Source]:
    """The places where an argument's value stands, the most reliable first; none for a value from nowhere."""
    if _listed(value, schema):
        return [{"literal": value}]
    if value is None or isinstance(value, bool | list | dict):
        return []
    text, found = str(value), list[Source]()
    shape = shape_of(text)
    if shape is not None and any(text in of_shape(shape, said) for said in live.said):
        found.append({"said": shape})
    for call in reversed(live.calls):
        found += ({"argument": call.name, "name": key} for key, one in call.arguments.items() if str(one) == text)
    found += _reported(text, live)
    return list({str(source): source for source in found}.values())[:MOST_SOURCES]


def _listed(value: Any, schema: Schema) -> bool:
    if schema.get("type") == "boolean" and isinstance(value, bool):
        return True
    listed = [*schema.get("enum", ()), *([schema[key] for key in ("const", "default") if key in schema])]
    return any(type(one) is type(value) and one == value for one in listed)


def _reported(text: str, live: Live) -> Iterator[Source]:
    for result in live.results:
        if result.value is None or not isinstance(result.value, dict | list):
            shape = WHOLE if result.text == text else shape_of(text)
            if shape is not None and text in _shown(shape, result.text):
                yield {"shown": result.tool, "shape": shape}
            continue
        for path, value, _ in _places(result.value):
            if str(value) == text:
                yield {"result": result.tool, "path": path}


def _shown(shape: str, text: str) -> list[str]:
    return [text] if shape == WHOLE else of_shape(shape, text)


def _places(value: Any, path: str = "", row: Mapping[str, Any] | None = None) -> Iterator[tuple[str, Any, Any]]:
    """Every single value in an answer: its path without numbers, the value, and the row of a list that holds it."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            named = ANY_KEY if any(map(str.isdigit, str(key))) else str(key)  # a key with a number is a value itself
            within = inner if named == ANY_KEY and isinstance(inner, Mapping) else row
            yield from _places(inner, f"{path}.{named}" if path else named, within)
    elif isinstance(value, list):
        for inner in value:
            yield from _places(inner, f"{path}[]", inner if isinstance(inner, Mapping) else row)
    else:
        yield path, value, row


def fill(source: Source, tool: str, name: str, live: Live) -> Any:
    """The value at a source in the live conversation; None if there is none, or none that is clearly meant."""
    if "literal" in source:
        return source["literal"]
    if "said" in source:
        return next((found[-1] for said in live.said if (found := of_shape(source["said"], said))), None)
    if "argument" in source:
        asked = (call for call in reversed(live.calls) if call.name == source["argument"])
        return next((call.arguments[source["name"]] for call in asked if source["name"] in call.arguments), None)
    asked_before = {str(call.arguments.get(name)) for call in live.calls if call.name == tool}
    return _chosen([pair for pair in _offered(source, live) if str(pair[0]) not in asked_before], live)


def _offered(source: Source, live: Live) -> list[tuple[Any, Any]]:
    """The values at a source in the tool's latest answer, each with its row."""
    wanted = source.get("result") or source.get("shown")
    result = next((one for one in live.results if one.tool == wanted), None)
    if result is None:
        return []
    if "shown" in source:
        return [(value, None) for value in _shown(source["shape"], result.text)]
    return [(value, row) for path, value, row in _places(result.value) if path == source["path"]]


def _chosen(offered: Sequence[tuple[Any, Any]], live: Live) -> Any:
    """The only value, or the one whose row says most of what the user said; of a bare list, the first."""
    values = list(dict.fromkeys(value for value, _ in offered if value is not None))
    if len(values) <= 1 or all(row is None for _, row in offered):
        return values[0] if values else None
    said = words(" ".join(live.said))
    shared = {value: len(said & words(" ".join(map(str, row.values())))) for value, row in offered if row is not None}
    ranked = sorted(shared, key=lambda value: -shared[value])
    return ranked[0] if len(ranked) == 1 or shared[ranked[0]] > shared[ranked[1]] else None
