"""The order desk: repeated customer workflows on a real database, served by a LangChain agent.

desk = make_database(seed=0)
for request in make_requests("B", full=False, seed=0):
    transcript = run_request(chat_model, request, desk)
"""

from __future__ import annotations

from precedent_demo import workflows
from precedent_demo.conversation import MAX_TOKENS_PER_TURN, SYSTEM_PROMPT, Transcript, run_request
from precedent_demo.desk import OrderDesk, PolicyError
from precedent_demo.tools import make_tools
from precedent_demo.workflows import Call, Line, Request

__all__ = [
    "MAX_TOKENS_PER_TURN",
    "SYSTEM_PROMPT",
    "Call",
    "Line",
    "OrderDesk",
    "PolicyError",
    "Request",
    "Transcript",
    "make_database",
    "make_requests",
    "make_tools",
    "run_request",
]


def make_database(seed: int) -> OrderDesk:
    """An order desk with about 500 orders of 200 customers in memory; the seed fixes every row."""
    return OrderDesk.from_seed(seed)


def make_requests(set_name: str, full: bool = False, seed: int = 0) -> list[Request]:
    """The requests of set "A" (30, full 60) or "B" (15, full 40) for the database of the same seed.

    Raises ConfigError for another set name.
    """
    desk = make_database(seed)
    try:
        return workflows.make_requests(set_name, full, seed, desk)
    finally:
        desk.close()
