"""Renders the templates beside this file, which escape everything that a model wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import jinja2

from precedent.pages.colours import Palette

Decode = Callable[[Sequence[int]], str]


class Piece(NamedTuple):
    """Consecutive tokens of one source."""

    text: str
    source: str
    colour: str


def page(template: str, **values: Any) -> str:
    """Render a template in the folder `templates` to HTML."""
    return _templates().get_template(template).render(values)


def pieces(token_ids: Sequence[int], sources: Sequence[str], decode: Decode, palette: Palette) -> list[Piece]:
    """Split an answer into runs of equal source."""
    runs = groupby(zip(sources, token_ids, strict=False), key=lambda pair: pair[0])
    return [Piece(decode([token for _, token in run]), source, palette.of(source).page) for source, run in runs]


@cache
def _templates() -> jinja2.Environment:
    loader = jinja2.PackageLoader("precedent", "pages/templates")
    return jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
