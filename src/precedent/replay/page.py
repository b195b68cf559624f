"""The replay page: the figures, the curve, one candidate tree, and answers coloured by who would have drafted them."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.replay.contenders import Drafted
from precedent.replay.curve_picture import curve_svg
from precedent.replay.lineup import Entry
from precedent.replay.run import Observer
from precedent.replay.simulate import Watch
from precedent.replay.tree_picture import COLOURS, OTHER_COLOUR, SeenTree, tree_svg
from precedent.replay.turns import Turn
from precedent.tree import CandidateTree

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; padding: 0 1em; color: #222 }
table { border-collapse: collapse } td, th { padding: .3em .8em; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left } .wide { overflow-x: auto }
pre { white-space: pre-wrap; background: #fafafa; padding: .8em } span { border-radius: 3px }
"""
_COLUMNS = (
    "name", "tokens_per_step", "ratio", "tokens_per_step_tool_calls", "tokens_per_step_text", "draft_tokens_per_step",
    "tokens_per_plain_step_time", "microseconds_per_step",
)  # fmt: skip


class ShownTurns(Observer):
    """Remembers some turns with the sources of their tokens, and the tree that shows most."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.turns: list[tuple[Turn, Sequence[str]]] = []
        self.tree: SeenTree | None = None

    def watch(self, turn: Turn, entry: Entry) -> Watch | None:
        """Look at every tree, and keep the one with most to see."""
        contender = entry.contender
        if not isinstance(contender, Drafted) or not self._most:
            return None

        def look(tree: CandidateTree, path: Sequence[int], before: Sequence[int]) -> None:
            seen = SeenTree(tree, tuple(path), tuple(before), tuple(contender.estimates.tolist()))
            if seen.interest > (self.tree.interest if self.tree else 0.0):
                self.tree = seen

        return look

    def turn(self, turn: Turn, sources: Sequence[str]) -> None:
        """Keep the turn, while there is room."""
        if len(self.turns) < self._most:
            self.turns.append((turn, sources))


def write_page(path: Path, results: Mapping[str, Any], shown: ShownTurns, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write one HTML file: the table, the curve, the tree, and the answers."""
    legend = " ".join(
        f'<span style="background:{colour}">&nbsp;{name}&nbsp;</span>' for name, colour in COLOURS.items()
    )
    answers = "".join(f"<pre>{_coloured(*pair, tokenizer)}</pre>" for pair in shown.turns)
    pictures = "".join(f'<div class="wide">{svg}</div>' for svg in pictures_of(results, shown, tokenizer).values())
    page = (
        f"<!doctype html><meta charset=utf-8><title>Replay</title><style>{_STYLE}</style><h1>Replay</h1>"
        f"<p>{_summary(results)}</p>{_table(results)}{pictures}<p>{legend}</p>{answers}"
    )
    path.write_text(page, encoding="utf-8")


def pictures_of(results: Mapping[str, Any], shown: ShownTurns, tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """File name and SVG of every picture."""
    pictures = {"replay-curve.svg": curve_svg(results["drafters"])}
    if shown.tree is not None:
        pictures["replay-tree.svg"] = tree_svg(shown.tree, lambda ids: str(tokenizer.decode(list(ids))))
    return pictures


def _summary(results: Mapping[str, Any]) -> str:
    return (
        f"{results['turns']} turns, {results['tokens']} tokens; {results['exact_repeats']} answers stand word for word "
        f"in the pool; {results['repetition']:.1%} of the tokens repeat four tokens of their own answer."
    )


def _table(results: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{column.replace('_', ' ')}</th>" for column in _COLUMNS)
    rows = (
        "<tr>" + "".join(f"<td>{html.escape(_cell(row.get(column)))}</td>" for column in _COLUMNS) + "</tr>"
        for row in results["drafters"]
    )
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _coloured(turn: Turn, sources: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str:
    """Runs of equal sources in one span each."""
    spans = []
    for source, run in groupby(zip(sources, turn.token_ids, strict=False), key=lambda pair: pair[0]):
        text = str(tokenizer.decode([token for _, token in run], skip_special_tokens=True))
        colour = COLOURS.get(source, OTHER_COLOUR)
        spans.append(f'<span style="background:{colour}" title="{html.escape(source)}">{html.escape(text)}</span>')
    return "".join(spans)
