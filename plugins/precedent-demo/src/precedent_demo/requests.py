"""What a customer wants, as data: the words that will be said, and the database that should come of it."""

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
    """What stands behind a request: how the order is found, what is done with it, what is asked about it.

    `found_by` is "number" or "email" (said at once), "asked number" or "asked email" (said when asked for), or
    "wrong email" (corrected when asked). `concern` and `second_concern` name what is wanted, as in `wording`;
    `questions` are asked after it is done.
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
    """One customer's request: what he says, and what has to come of it.

    `replies` are what he answers when asked to identify himself ("identify") or to agree ("confirm"); `remarks` follow
    one by one after every other answer. `calls` lead to the gold state of the database; `facts` have to be told to him.
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
