"""`response_metadata["speculation"]` and the page that lists its keys: neither has one that the other lacks."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from precedent import ChatPrecedent
from precedent.decoding.stats import GenerationStats

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "answers.md"


def listed_below(heading: str) -> dict[str, str]:
    """Meaning by key, of the list below a heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^- (`\w+`(?:, `\w+`)*): (.+)$", section, re.MULTILINE)
    return {key: meaning for keys, meaning in rows for key in re.findall(r"`(\w+)`", keys)}


def told(**settings: Any) -> dict[str, Any]:
    """What stats of some setting say, beside what every chat answer has."""
    return GenerationStats(**settings).as_dict()


def test_the_page_lists_every_key_of_every_kind_of_answer(precedent_engine: Any) -> None:
    llm = ChatPrecedent.from_engine(precedent_engine(["on its way"]))
    answered = llm.invoke("where is it?").response_metadata["speculation"]
    kinds = [
        answered,
        told(mode="lossy_typical"),
        told(extra=Counter(num_lookaheads=3, num_lookaheads_used=1)),
        told(bitwise=True),
    ]
    assert listed_below('`response_metadata["speculation"]`').keys() == set().union(*kinds)

    assert [*listed_below("`latency_microseconds`")] == [*told()["latency_microseconds"]]
    first, *others = ChatPrecedent.from_engine(precedent_engine(["on its way"])).stream("where is it?")
    streamed = sum(others, first).response_metadata["speculation"]
    assert min(answered["estimated_speedup"], streamed["estimated_speedup"]) > 0
