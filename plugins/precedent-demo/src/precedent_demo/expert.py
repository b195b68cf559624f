"""The environment's expert: it knows what a customer wants and serves them as an assistant should.

The adapter is trained on its conversations, and its calls define the expected outcome of a request. It uses only what a
real assistant could know at that point, except that it reads the order and the item from the goal.
"""

from __future__ import annotations

import random
from collections.abc import Generator
from dataclasses import dataclass
from string import Formatter
from typing import Any

from precedent_demo.desk import OrderDesk, PolicyError
from precedent_demo.requests import Call, Goal

IDENTIFY_ORDER = ("May I have the order number or your email?", "What is the order number, or your email?")
IDENTIFY_CUSTOMER = ("May I have your email?", "What is your email, please?")
NO_CUSTOMER = ("I find no customer with this email. Could you check it?", "This email is unknown. Could you check it?")

ANSWERS: dict[str, tuple[str, ...]] = {
    "status": ("Order {order} is {status}.", "The status of order {order} is {status}."),
    "total": ("The total of order {order} is {total}.", "Order {order} was {total} in all."),
    "address": ("Order {order} goes to {address}.", "The address of order {order} is {address}."),
    "on its way": ("Order {order} is in {place} and due on {due}.", "It is in {place} and is due on {due}."),
    "arrived": ("Order {order} was delivered on {delivered}.", "{carrier} delivered it on {delivered}."),
    "no shipment": ("Order {order} is {status} and has no shipment yet.", "It is still {status}, not yet shipped."),
    "processing": ("Your refund of {amount} is being processed and due on {due}.", "{amount} is refunded on {due}."),
    "paid": ("Your refund of {amount} was paid on {due}.", "{amount} was refunded on {due}."),
    "cancelled": ("Order {order} is cancelled. You get {refund} back.", "I have cancelled it and refund {refund}."),
    "address changed": ("Order {order} now goes to {address}.", "Done, order {order} will be sent to {address}."),
    "returned": ("Please send the {name} back. You get {refund}.", "The return is open, and you get {refund} back."),
    "exchanged": ("You get the {new_item}. Please send the old one back.", "The exchange is open for the {new_item}."),
    "stays": ("All right, order {order} stays as it is.", "Then I change nothing."),
    "too late to cancel": (
        "Order {order} is {status}, so it cannot be cancelled.",
        "I cannot cancel it: it is {status}.",
    ),
    "too late to change": (
        "Order {order} is {status}, so its address stays.",
        "I cannot change it: order {order} is {status}.",
    ),
    "too early to return": (
        "Order {order} is {status}: nothing can come back yet.",
        "It is too early: it is {status}.",
    ),
    "returns closed": ("Returns for order {order} {returns}.", "I cannot take it back: returns {returns}."),
    "out of stock": ("The {product}, {option} is out of stock.", "I am sorry, {option} is out of stock."),
    "one order": ("You have one order: {orders}.", "There is one order: {orders}."),
    "orders": ("You have {count} orders: {orders}.", "There are {count} orders: {orders}."),
    "my address": ("Your address is {address}.", "We have the address {address}."),
    "my number": ("Your customer number is {customer}.", "You are customer {customer}."),
    "carrier": ("{carrier} brings it.", "The carrier is {carrier}."),
    "method": ("The money is paid back by {method}.", "You get it by {method}."),
    "refund due": ("The money is due on {due}.", "You get it by {due}."),
    "send_by": ("Please send it by {send_by}.", "The last day is {send_by}."),
    "return number": ("The number is {number}.", "Please write {number} on it."),
}
"""Sentences of the same meaning by kind of answer. The blanks of all of them, but the order's number and how many
orders there are, are facts that the customer must be told."""

CONFIRM = {
    "cancel": (
        "Order {order} is {status}, {total} in all. Shall I cancel it?",
        "Shall I cancel order {order} for {total}?",
    ),
    "change address": ("Shall I send order {order} to {address}?", "So order {order} goes to {address}, right?"),
    "return": ("Shall I open a return of the {name} for {price}?", "You get {price} for the {name}. Shall I go on?"),
    "exchange": ("Shall I swap the {name} for {option}?", "So {option} instead of the {name}, right?"),
}


@dataclass(frozen=True, slots=True)
class Said:
    """A turn of text, and the facts in it that the customer must be told."""

    text: str
    facts: tuple[str, ...] = ()


Turn = Call | Said
Talk = Generator[Turn, Any, dict[str, Any]]
"""Yields turns; send it the tool's result after a call and nothing after text. Returns the last relevant result."""

_REFUSED = {"cancel": "too late to cancel", "change address": "too late to change"}
_DONE = {"cancel": "cancelled", "change address": "address changed", "return": "returned", "exchange": "exchanged"}
_COUNTS = ("no", "one", "two", "three", "four", "five")
_ACTIONS = {
    "change address": ("change_address", ("order", "address")),
    "cancel": ("cancel_order", ("order", "reason")),
    "return": ("request_return", ("order", "item")),
    "exchange": ("exchange_item", ("order", "item", "option")),
}
_FOLLOW_UPS = {"number": "return number", "due": "refund due"}


class Expert:
    """Serves one goal; `rng` chooses among sentences of the same meaning."""

    def __init__(self, goal: Goal, rng: random.Random) -> None:
        self._goal, self._rng = goal, rng
        self._known: dict[str, Any] = {"order": goal.order, "product": goal.product, "option": goal.option}

    def turns(self) -> Generator[Turn, Any, None]:
        """All turns of the assistant, in order; send the result after each call and nothing after text."""
        goal = self._goal
        if goal.concern in ("list orders", "my address", "my number"):
            yield from self._about_customer()
        else:
            yield from self._find_order()
            for concern in filter(None, (goal.concern, goal.second_concern)):
                yield from self._serve(concern)
        for question in goal.questions:
            yield self._answer(_FOLLOW_UPS.get(question, question))

    def _call(self, name: str, **arguments: str) -> Talk:
        result: dict[str, Any] = yield Call(name, arguments)
        self._known |= result
        return result

    def _find_order(self) -> Generator[Turn, Any, None]:
        if self._goal.found_by.startswith("asked"):
            yield self._said(IDENTIFY_ORDER)
        if self._goal.found_by not in ("number", "asked number"):
            yield from self._find_customer()
            yield from self._call("list_orders", customer=self._known["customer"])

    def _find_customer(self) -> Generator[Turn, Any, None]:
        if self._goal.wrong_email:
            yield from self._call("find_customer", email=self._goal.wrong_email)
            yield self._said(NO_CUSTOMER)
        yield from self._call("find_customer", email=self._goal.email)

    def _about_customer(self) -> Generator[Turn, Any, None]:
        if self._goal.found_by.startswith("asked"):
            yield self._said(IDENTIFY_CUSTOMER)
        yield from self._find_customer()
        if self._goal.concern != "list orders":
            yield self._answer(self._goal.concern)
            return
        orders = (yield from self._call("list_orders", customer=self._known["customer"]))["orders"]
        self._known["orders"] = _joined([f"{order['order']} ({order['status']})" for order in orders])
        self._known["count"] = _COUNTS[len(orders)]
        yield self._answer("one order" if len(orders) == 1 else "orders")

    def _serve(self, concern: str) -> Generator[Turn, Any, None]:
        if concern in _ACTIONS:
            yield from self._act(concern)
        elif concern == "track":
            yield from self._track()
        elif concern == "refund":
            refund = yield from self._call("get_refund_status", order=self._goal.order)
            yield self._answer(refund["status"])
        else:
            yield from self._call("get_order", order=self._goal.order)
            yield self._answer(concern)

    def _track(self) -> Generator[Turn, Any, None]:
        result = yield from self._call("track_shipment", order=self._goal.order)
        if "error" in result:
            self._known["status"] = "pending"
            yield self._answer("no shipment")
        else:
            yield self._answer("arrived" if "delivered" in result else "on its way")

    def _act(self, concern: str) -> Generator[Turn, Any, None]:
        """Look up the order unless it is known; then refuse, or ask for consent and act."""
        if "items" not in self._known:
            yield from self._call("get_order", order=self._goal.order)
        refusal = self._refusal(concern)
        if refusal:
            yield self._answer(refusal)
            return
        yield self._said(CONFIRM[concern], self._asked_about())
        if not self._goal.agrees:
            yield self._answer("stays")
            return
        name, keys = _ACTIONS[concern]
        result = yield from self._call(name, **{key: getattr(self._goal, key) for key in keys})
        self._known["number"] = result.get("return") or result.get("exchange")
        yield self._answer("out of stock" if "error" in result else _DONE[concern])

    def _refusal(self, concern: str) -> str | None:
        status = self._known["status"]
        if concern in _REFUSED:
            return None if status == "pending" else _REFUSED[concern]
        if status != "delivered":
            return "too early to return"
        return "returns closed" if self._known["returns"].startswith("closed") else None

    def _asked_about(self) -> dict[str, str]:
        item = next((item for item in self._known["items"] if item["item"] == self._goal.item), {})
        self._known |= {"name": item.get("name"), "price": item.get("price")}
        return {"address": self._goal.address} if self._goal.address else {}

    def _said(self, sentences: tuple[str, ...], blanks: dict[str, str] | None = None) -> Said:
        return Said(self._rng.choice(sentences).format(**(self._known | (blanks or {}))))

    def _answer(self, kind: str) -> Said:
        blanks = [[name for _, name, _, _ in Formatter().parse(sentence) if name] for sentence in ANSWERS[kind]]
        told = [name for name in blanks[0] if all(name in each for each in blanks) and name not in ("order", "count")]
        return Said(self._said(ANSWERS[kind]).text, tuple(self._known[name] for name in told))


def gold(goal: Goal, desk: OrderDesk) -> tuple[tuple[Call, ...], tuple[str, ...]]:
    """The calls that change the database, and the facts to tell; `desk` itself does not change."""
    own = desk.copy()
    calls: list[Call] = []
    facts: list[str] = []
    talk = Expert(goal, random.Random(0)).turns()
    result: Any = None
    try:
        while True:
            turn = talk.send(result)
            if isinstance(turn, Said):
                facts += turn.facts
                result = None
                continue
            changes = own.num_changes
            result = outcome(turn, own)
            if own.num_changes != changes:
                calls.append(turn)
    except StopIteration:
        return tuple(calls), tuple(facts)
    finally:
        own.close()


def outcome(call: Call, desk: OrderDesk) -> dict[str, Any]:
    """The answer to a tool call."""
    try:
        result: dict[str, Any] = getattr(desk, call.name)(**call.arguments)
    except PolicyError as refusal:
        return {"error": str(refusal)}
    return result


def _joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
