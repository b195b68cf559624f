"""The replay page: recorded answers with every token coloured by the source that would have drafted it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.replay.turns import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLOURS = {"target": "#e9e9e9", "recall": "#b7e4c7", "prompt": "#bde0fe", "suffix": "#ffd6a5"}
OTHER_COLOUR = "#e0bbe4"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; color: #222 }
table { border-collapse: collapse } td, th { padding: .3em .8em; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left }
pre { white-space: pre-wrap; background: #fafafa; padding: .8em } span { border-radius: 3px }
"""
_COLUMNS = (
    "name", "tokens_per_step", "tokens_per_step_tool_calls", "tokens_per_step_text", "draft_tokens_per_step",
    "microseconds_per_step",
)  # fmt: skip


class ShownTurns:
    """Remembers the last contender's sources of some turns."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.turns: dict[tuple[int, int], tuple[Turn, Sequence[str]]] = {}

    def __call__(self, turn: Turn, name: str, sources: Sequence[str]) -> None:
        """Keep a turn; the last contender's word counts."""
        key = (turn.trajectory, len(turn.prompt_ids))
        if key in self.turns or len(self.turns) < self._most:
            self.turns[key] = (turn, sources)


def write_page(path: Path, results: Mapping[str, Any], shown: ShownTurns, tokenizer: PreTrainedTokenizerBase) -> None:
    """Write one HTML file: the table, and the answers."""
    legend = " ".join(
        f'<span style="background:{colour}">&nbsp;{name}&nbsp;</span>' for name, colour in COLOURS.items()
    )
    answers = "".join(f"<pre>{_coloured(*pair, tokenizer)}</pre>" for pair in shown.turns.values())
    page = (
        f"<!doctype html><meta charset=utf-8><title>Replay</title><style>{_STYLE}</style><h1>Replay</h1>"
        f"{_table(results)}<p>{legend}</p>{answers}"
    )
    path.write_text(page, encoding="utf-8")


def _table(results: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{column.replace('_', ' ')}</th>" for column in _COLUMNS)
    rows = (
        "<tr>" + "".join(f"<td>{html.escape(str(row[column]))}</td>" for column in _COLUMNS) + "</tr>"
        for row in results["drafters"]
    )
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _coloured(turn: Turn, sources: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> str:
    """Runs of equal sources in one span each."""
    spans = []
    for source, run in groupby(zip(sources, turn.token_ids, strict=False), key=lambda pair: pair[0]):
        text = str(tokenizer.decode([token for _, token in run], skip_special_tokens=True))
        colour = COLOURS.get(source, OTHER_COLOUR)
        spans.append(f'<span style="background:{colour}" title="{html.escape(source)}">{html.escape(text)}</span>')
    return "".join(spans)
