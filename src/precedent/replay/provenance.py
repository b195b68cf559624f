"""The provenance page: one HTML file in which every token is coloured by where it came from."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

COLOURS = {"target": "#e9e9e9", "recall": "#b7e4c7", "prompt": "#bde0fe", "draft-model": "#ffd6a5"}
OTHER_COLOUR = "#e0bbe4"
MOST_REQUESTS = 6
"""Requests shown per run: a page, not an archive."""

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 70em; margin: 2em auto; color: #222 }
table { border-collapse: collapse } td, th { padding: .3em .8em; border-bottom: 1px solid #ddd; text-align: right }
td:first-child, th:first-child { text-align: left }
pre { white-space: pre-wrap; background: #fafafa; padding: .8em } span { border-radius: 3px }
"""


def write_page(
    path: Path, results: Mapping[str, Any], runs: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase
) -> None:
    """Write the page of a demo: its table, and the answers of some requests with every token's source."""
    legend = " ".join(
        f'<span style="background:{colour}">&nbsp;{name}&nbsp;</span>' for name, colour in COLOURS.items()
    )
    sections = "".join(_run_section(name, run.requests, tokenizer) for name, run in runs.items())
    page = (
        f"<!doctype html><meta charset=utf-8><title>Where the tokens came from</title><style>{_STYLE}</style>"
        f"<h1>Where the tokens came from</h1>{_table(results)}<p>{legend}</p>{sections}"
    )
    path.write_text(page, encoding="utf-8")


def _table(results: Mapping[str, Any]) -> str:
    columns = ("name", "requests", "tokens", "steps", "tokens_per_step", "tokens_per_second", "decode_seconds")
    head = "".join(f"<th>{column.replace('_', ' ')}</th>" for column in columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(str(run[column]))}</td>" for column in columns) + "</tr>"
        for run in results["runs"]
    )
    return f"<table><tr>{head}</tr>{rows}</table>"


def _run_section(name: str, requests: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    answers = "".join(
        f"<h3>request {number}</h3>" + "".join(f"<pre>{_coloured(turn.result, tokenizer)}</pre>" for turn in turns)
        for number, turns in enumerate(requests[:MOST_REQUESTS])
    )
    return f"<details><summary><b>{html.escape(name)}</b></summary>{answers}</details>"


def _coloured(result: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """One answer, runs of equal sources in one span."""
    spans, start = [], 0
    ids, sources = result.token_ids, result.sources
    for end in range(1, len(ids) + 1):
        if end == len(ids) or sources[end] != sources[start]:
            text = html.escape(str(tokenizer.decode(list(ids[start:end]))))
            colour = COLOURS.get(sources[start], OTHER_COLOUR)
            spans.append(f'<span style="background:{colour}" title="{html.escape(sources[start])}">{text}</span>')
            start = end
    return "".join(spans)
