"""Measures how many held-out requests a target model solves, in a closed loop with real tools and a real database.

python -m precedent_demo.evaluation --requests 100
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.errors import PrecedentError
from precedent_demo.conversation import MAX_TOKENS_PER_TURN, Transcript, run_request
from precedent_demo.desk import OrderDesk
from precedent_demo.workflows import SPLITS, generate_requests

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel


def served(chat_model: BaseChatModel, set_name: str, seed: int, requests: int) -> Iterator[Transcript]:
    """Serve the first `requests` of a set on the database of `seed`; says after each whether it was solved."""
    desk = OrderDesk.from_seed(seed, SPLITS[set_name])
    for request in islice(generate_requests(set_name, seed, desk), requests):
        transcript = run_request(chat_model, request, desk)
        solved = "solved" if transcript.solved_by_model else "not solved"
        print(f"{request.request_id} {request.workflow}: {solved}", file=sys.stderr, flush=True)
        yield transcript


def report(transcripts: Iterable[Transcript]) -> dict[str, Any]:
    """Counts over all requests; rates come with Wilson's 95 % interval."""
    found = list(transcripts)
    answers = [answer for transcript in found for answer in transcript.answers]
    calls = sum(len(answer.tool_calls) for answer in answers)
    invalid = sum(len(answer.invalid_tool_calls) for answer in answers)
    return {
        "requests": len(found),
        "solved": _rate(sum(one.solved_by_model for one in found), len(found)),
        "gold_state": _rate(sum(one.gold_reached for one in found), len(found)),
        "calls_parsed": _rate(calls, calls + invalid),
        "turns": len(answers),
    }


def _rate(hits: int, total: int) -> dict[str, Any]:
    number = max(total, 1)
    rate, width = hits / number, 1.96**2 / number
    middle = (rate + width / 2) / (1 + width)
    spread = 1.96 * math.sqrt(rate * (1 - rate) / number + width / (4 * number)) / (1 + width)
    interval = [round(end, 4) for end in (middle - spread, middle + spread)]
    return {"hits": hits, "of": total, "rate": round(rate, 4), "interval": interval}


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
        cache = SpeculationCache.open(None)
        model = ChatPrecedent(model=target, speculation_cache=cache, temperature=0.0, max_tokens=MAX_TOKENS_PER_TURN)
        found = report(served(model, options.set_name, options.seed, options.requests))
    except PrecedentError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
