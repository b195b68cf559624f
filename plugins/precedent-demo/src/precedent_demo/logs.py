"""Conversations of the environment's expert, and chat traces of them for `replay`, `train-draft` and `measure-draft`.

python -m precedent_demo.logs --set A --requests 40 --out desk.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

from langchain_core.utils.function_calling import convert_to_openai_tool

from precedent.text.prompt import Message
from precedent_demo import make_database
from precedent_demo.conversation import SYSTEM_PROMPT
from precedent_demo.desk import OrderDesk
from precedent_demo.expert import Expert, Said, outcome
from precedent_demo.requests import Customer, Request
from precedent_demo.tools import make_tools
from precedent_demo.workflows import SPLITS, generate_requests


def expert_messages(request: Request, desk: OrderDesk, rng: random.Random) -> list[Message]:
    """The conversation of customer and expert as template messages, without the system message."""
    own, customer = desk.copy(), Customer(request)
    messages: list[Message] = [{"role": "user", "content": customer.opening}]
    talk, result = Expert(request.goal, rng).turns(), None
    while True:
        try:
            turn = talk.send(result)
        except StopIteration:
            own.close()
            return messages
        if isinstance(turn, Said):
            result = customer.reply(turn.text)
            messages.append({"role": "assistant", "content": turn.text})
            messages += [{"role": "user", "content": result}] if result else []
        else:
            result = outcome(turn, own)
            function = {"name": turn.name, "arguments": dict(turn.arguments)}
            calls = [{"type": "function", "function": function}]
            messages.append({"role": "assistant", "content": "", "tool_calls": calls})
            messages.append({"role": "tool", "content": json.dumps(result)})


@lru_cache(maxsize=1)
def tool_schemas() -> tuple[dict[str, Any], ...]:
    """The tools in the form in which `create_agent` gives them to a chat model."""
    desk = make_database(0)
    try:
        return tuple(convert_to_openai_tool(tool) for tool in make_tools(desk))
    finally:
        desk.close()


def logged(set_name: str, seed: int) -> Iterator[dict[str, Any]]:
    """Endless conversations of a set on the database of `seed`; their task ids tell set, number and seed."""
    desk, rng = make_database(seed, SPLITS[set_name]), random.Random(f"log {set_name} {seed}")
    for request in generate_requests(set_name, seed, desk):
        yield {
            "task_id": f"{request.request_id}/{seed}" if seed else request.request_id,
            "group": request.workflow,
            "messages": [{"role": "system", "content": SYSTEM_PROMPT}, *expert_messages(request, desk, rng)],
            "tools": tool_schemas(),
        }


def main() -> None:
    """Write the traces that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m precedent_demo.logs", description=__doc__)
    parser.add_argument("--set", default="A", choices=sorted(SPLITS), dest="set_name")
    parser.add_argument("--seed", type=int, default=0, help="seed of the database and the requests")
    parser.add_argument("--requests", type=int, default=40)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    with options.out.open("w", encoding="utf-8") as out:
        for record in islice(logged(options.set_name, options.seed), options.requests):
            out.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
