"""A customer's request as data: the words of the customer, and the expected outcome."""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the desk needs."""

    name: str
    arguments: dict[str, str] = field(hash=False)

    def text(self) -> str:
        """The call as a model writes it (Hermes format)."""
        shown = json.dumps({"name": self.name, "arguments": self.arguments})
        return f"<tool_call>\n{shown}\n</tool_call>"


@dataclass(frozen=True, slots=True)
class Goal:
    """The plan behind a request: how the order is found, what is done with it, and what is asked about it.

    `found_by` is "number" or "email" (given at once), "asked number" or "asked email" (given on request), or
    "wrong email" (corrected on request). `concern` and `second_concern` name what the customer wants, as in `wording`;
    `questions` follow afterwards.
    """

    concern: str
    found_by: str
    email: str
    order: str
    product: str
    wrong_email: str = ""
    item: str = ""
    option: str = ""
    address: str = ""
    reason: str = ""
    second_concern: str = ""
    agrees: bool = True
    questions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One customer's request: what the customer says, and the expected outcome.

    `replies` answer a question for identity ("identify") or for consent ("confirm"); after any other answer comes the
    next of `remarks`. `calls` lead to the gold state of the database; the assistant must tell all `facts`.
    """

    request_id: str
    workflow: str
    customer_id: str
    opening: str
    replies: dict[str, str] = field(hash=False)
    remarks: tuple[str, ...]
    calls: tuple[Call, ...]
    facts: tuple[str, ...]
    goal: Goal
