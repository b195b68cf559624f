"""A customer's request: its words and expected outcome as data, and the scripted customer who speaks them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call that the desk needs."""

    name: str
    arguments: dict[str, str] = field(hash=False)


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


class Customer:
    """The customer of one conversation; its replies depend only on the request and on the assistant's words."""

    def __init__(self, request: Request) -> None:
        self.opening = request.opening
        self._replies, self._remarks = dict(request.replies), list(request.remarks)

    def reply(self, text: str) -> str | None:
        """The reply to these words of the assistant: to a question, else the next remark; None if all is said."""
        who = "email" in text.lower() or "order number" in text.lower()
        reply = self._replies.pop("identify" if who else "confirm", None) if "?" in text else None
        return reply if reply is not None or not self._remarks else self._remarks.pop(0)
