"""Measures how many held-out requests a target model solves, in a closed loop with real tools and a real database.

python -m precedent_demo.evaluation --requests 100
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from precedent.errors import PrecedentError
from precedent_demo.conversation import MAX_TOKENS_PER_TURN, Transcript, run_request
from precedent_demo.desk import OrderDesk
from precedent_demo.workflows import SPLITS, generate_requests

if TYPE_CHECKING:
    from langchain_core.language_models import BaseChatModel


@dataclass(slots=True)
class Report:
    """Counts over all requests so far."""

    requests: int = 0
    solved: int = 0
    gold_reached: int = 0
    calls: int = 0
    invalid_calls: int = 0
    turns: int = 0
    prompt_tokens: int = 0
    longest_prompt: int = 0
    by_workflow: dict[str, Counter[bool]] = field(default_factory=dict)

    def add(self, transcript: Transcript) -> None:
        """Count one conversation."""
        self.requests += 1
        self.solved += transcript.solved_by_model
        self.gold_reached += transcript.gold_reached
        self.calls += transcript.num_calls
        self.invalid_calls += transcript.num_invalid_calls
        prompts = [answer.usage_metadata["input_tokens"] for answer in transcript.answers if answer.usage_metadata]
        self.turns += len(transcript.answers)
        self.prompt_tokens += sum(prompts)
        self.longest_prompt = max(self.longest_prompt, *prompts, 0)
        self.by_workflow.setdefault(transcript.request.workflow, Counter())[transcript.solved_by_model] += 1

    def as_dict(self) -> dict[str, Any]:
        """All figures; rates come with their 95 % interval."""
        return {
            "requests": self.requests,
            "solved": _rate(self.solved, self.requests),
            "gold_state": _rate(self.gold_reached, self.requests),
            "calls_parsed": _rate(self.calls, self.calls + self.invalid_calls),
            "turns": self.turns,
            "prompt_tokens_mean": round(self.prompt_tokens / max(1, self.turns)),
            "prompt_tokens_max": self.longest_prompt,
            "solved_by_workflow": {name: [c[True], c.total()] for name, c in self.by_workflow.items()},
        }


def _rate(hits: int, total: int) -> dict[str, Any]:
    low, high = wilson(hits, total)
    return {"hits": hits, "of": total, "rate": round(hits / max(1, total), 4), "interval": [low, high]}


def wilson(hits: int, total: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a rate; (0, 1) if `total` is 0."""
    if total == 0:
        return 0.0, 1.0
    z = 1.96
    rate, width = hits / total, z * z / total
    middle = (rate + width / 2) / (1 + width)
    spread = z * math.sqrt(rate * (1 - rate) / total + width / (4 * total)) / (1 + width)
    return round(max(0.0, middle - spread), 4), round(min(1.0, middle + spread), 4)


def evaluate(chat_model: BaseChatModel, set_name: str, seed: int, requests: int, show: bool = False) -> Report:
    """Serve the first `requests` of a set on the database of `seed`; `show` prints the failed conversations."""
    report, desk = Report(), OrderDesk.from_seed(seed, SPLITS[set_name])
    for request in islice(generate_requests(set_name, seed, desk), requests):
        transcript = run_request(chat_model, request, desk)
        report.add(transcript)
        progress = f"{report.solved} of {report.requests} solved, {report.invalid_calls} invalid calls"
        print(f"{request.request_id} {request.workflow}: {progress}", file=sys.stderr, flush=True)
        if show and not transcript.solved_by_model:
            _show(transcript)
    desk.close()
    return report


def _show(transcript: Transcript) -> None:
    wanted = [call.text() for call in transcript.request.calls]
    print(
        f"  gold reached: {transcript.gold_reached}, calls {wanted}, facts {transcript.request.facts}", file=sys.stderr
    )
    for message in transcript.messages:
        made = [(call["name"], call["args"]) for call in getattr(message, "tool_calls", [])]
        print(f"  {message.type}: {message.text} {made or ''}", file=sys.stderr, flush=True)


def _chat_model(target: str | None, adapter: str | None) -> BaseChatModel:
    from precedent import ChatPrecedent, SpeculationCache
    from precedent_demo.adapted import adapted_target

    name = target or str(adapted_target(Path(adapter) if adapter else None))
    # drafting from earlier answers changes only the speed: greedy answers stay the target's own
    return ChatPrecedent(
        model=name, speculation_cache=SpeculationCache.open(None), temperature=0.0, max_tokens=MAX_TOKENS_PER_TURN
    )


def main() -> None:
    """Print the report on one target model as JSON."""
    parser = argparse.ArgumentParser(prog="python -m precedent_demo.evaluation", description=__doc__)
    parser.add_argument(
        "--target", help="model id or folder to use instead of the adapted model, e.g. smollm2-135m-instruct"
    )
    parser.add_argument("--adapter", help="folder of an adapter to use instead of the package's own")
    parser.add_argument("--set", default="A", choices=sorted(SPLITS), dest="set_name")
    parser.add_argument("--seed", type=int, default=0, help="seed of the database and the requests")
    parser.add_argument("--requests", type=int, default=100)
    parser.add_argument("--show", action="store_true", help="show the failed conversations")
    options = parser.parse_args()
    try:
        chat_model = _chat_model(options.target, options.adapter)
        report = evaluate(chat_model, options.set_name, options.seed, options.requests, options.show)
    except PrecedentError as error:
        sys.exit(f"error: {error}")
    print(json.dumps(report.as_dict(), indent=2))


if __name__ == "__main__":
    main()
