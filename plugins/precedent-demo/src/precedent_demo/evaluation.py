"""Measures how many held-out requests a target model solves, in a closed loop with real tools and a real database.

python -m precedent_demo.evaluation --requests 100
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.errors import PrecedentError
from precedent_demo.conversation import MAX_TOKENS_PER_TURN, Transcript, run_request
from precedent_demo.desk import OrderDesk
from precedent_demo.workflows import SPLITS, generate_requests

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel


class Report:
    """Counts over all requests so far."""

    def __init__(self) -> None:
        self._counts, self._by_workflow = Counter[str](), dict[str, list[int]]()

    def add(self, transcript: Transcript) -> None:
        """Count one conversation."""
        answers, solved = transcript.answers, transcript.solved_by_model
        counts = {"requests": 1, "solved": solved, "gold": transcript.gold_reached, "turns": len(answers)}
        counts |= {"calls": sum(len(answer.tool_calls) for answer in answers)}
        counts |= {"invalid": sum(len(answer.invalid_tool_calls) for answer in answers)}
        self._counts.update(counts)
        row = self._by_workflow.setdefault(transcript.request.workflow, [0, 0])
        row[:] = row[0] + solved, row[1] + 1

    def as_dict(self) -> dict[str, Any]:
        """All figures; rates come with Wilson's 95 % interval."""
        counts = self._counts
        return {
            "requests": counts["requests"],
            "solved": _rate(counts["solved"], counts["requests"]),
            "gold_state": _rate(counts["gold"], counts["requests"]),
            "calls_parsed": _rate(counts["calls"], counts["calls"] + counts["invalid"]),
            "turns": counts["turns"],
            "solved_by_workflow": self._by_workflow,
        }


def _rate(hits: int, total: int) -> dict[str, Any]:
    if total == 0:
        return {"hits": 0, "of": 0, "rate": 0.0, "interval": [0.0, 1.0]}
    rate, width = hits / total, 1.96**2 / total
    middle = (rate + width / 2) / (1 + width)
    spread = 1.96 * math.sqrt(rate * (1 - rate) / total + width / (4 * total)) / (1 + width)
    interval = [round(max(0.0, middle - spread), 4), round(min(1.0, middle + spread), 4)]
    return {"hits": hits, "of": total, "rate": round(rate, 4), "interval": interval}


def evaluate(chat_model: BaseChatModel, set_name: str, seed: int, requests: int) -> Report:
    """Serve the first `requests` of a set on the database of `seed`; says after each whether it was solved."""
    report, desk = Report(), OrderDesk.from_seed(seed, SPLITS[set_name])
    for request in islice(generate_requests(set_name, seed, desk), requests):
        transcript = run_request(chat_model, request, desk)
        report.add(transcript)
        solved = "solved" if transcript.solved_by_model else "not solved"
        print(f"{request.request_id} {request.workflow}: {solved}", file=sys.stderr, flush=True)
    desk.close()
    return report


def main() -> None:
    """Print the report on one target model as JSON."""
    from precedent import ChatPrecedent, SpeculationCache
    from precedent_demo.adapted import adapted_target

    parser = argparse.ArgumentParser(prog="python -m precedent_demo.evaluation", description=__doc__)
    parser.add_argument("--target", help="model id or folder instead of the adapted model, e.g. smollm2-135m-instruct")
    parser.add_argument("--adapter", type=Path, help="folder of an adapter to use instead of the package's own")
    parser.add_argument("--set", default="A", choices=sorted(SPLITS), dest="set_name")
    parser.add_argument("--seed", type=int, default=0, help="seed of the database and the requests")
    parser.add_argument("--requests", type=int, default=100)
    options = parser.parse_args()
    try:
        target = options.target or str(adapted_target(options.adapter))
        # drafting from earlier answers changes only the speed: greedy answers stay the target's own
        chat_model = ChatPrecedent(
            model=target, speculation_cache=SpeculationCache.open(None), temperature=0.0, max_tokens=MAX_TOKENS_PER_TURN
        )
        report = evaluate(chat_model, options.set_name, options.seed, options.requests)
    except PrecedentError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(report.as_dict(), indent=2))


if __name__ == "__main__":
    main()
