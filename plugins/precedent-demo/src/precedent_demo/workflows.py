"""Repeated workflows of an order desk: which requests there are, and the script that leads each conversation.

Set A and set B never share a customer, an order, a name or a sentence, only the workflows, the lead (`LEAD` and the
call) and `BRIEFLY`, which are the desk's protocol and not a customer's wording.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from precedent.errors import ConfigError
from precedent_demo.catalogue import CITIES, STREETS
from precedent_demo.database import day
from precedent_demo.desk import CANCEL_REASONS, RETURN_WINDOW_DAYS, OrderDesk
from precedent_demo.wording import WORDINGS

SIZES = {"A": (30, 60), "B": (15, 40)}  # requests: usual, full
# Chosen by trial on SmolLM2-135M-Instruct: with the lead in a message of its own it made 8 of 8 calls, behind the
# customer's words in the same message at best 6; without the plea to be brief it echoes tool results more often.
LEAD = "Repeat this tool call:\n"
BRIEFLY = " Answer in one short sentence."


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
class Line:
    """What is said before one turn of the assistant: the customer's words, then the lead if a `call` is to be made."""

    text: str
    call: Call | None = None

    @property
    def messages(self) -> tuple[str, ...]:
        """The user messages of this line, in order (one or two)."""
        return (self.text,) if self.call is None else (self.text, LEAD + self.call.text())


@dataclass(frozen=True, slots=True)
class Request:
    """One customer's request: its workflow and the script, one line for each turn of the assistant."""

    request_id: str
    workflow: str
    customer_id: str
    script: tuple[Line, ...]

    @property
    def first_message(self) -> str:
        """What the customer says first."""
        return self.script[0].text

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls that lead to the gold state of the database, in order."""
        return tuple(line.call for line in self.script if line.call is not None)


@dataclass(frozen=True, slots=True)
class _Case:
    """A customer's concern before it is put into words: blanks of the wording beside the facts, and the call."""

    blanks: dict[str, str]
    call: Call


_Facts = dict[str, Any]
_MakeCase = Callable[[OrderDesk, random.Random, _Facts], _Case]


def make_requests(set_name: str, full: bool, seed: int, desk: OrderDesk) -> list[Request]:
    """The requests of set "A" or "B" for the database of `desk`; without `full` the first 30 (A) or 15 (B) of them.

    Raises ConfigError for another set name.
    """
    if set_name not in SIZES:
        raise ConfigError(f"there is no request set {set_name!r}; the sets are A and B")
    rng = random.Random(f"requests {set_name} {seed}")
    served: set[str] = set()
    names = list(_WORKFLOWS)
    requests = [_request(desk, rng, set_name, names[i % len(names)], i, served) for i in range(SIZES[set_name][1])]
    return requests if full else requests[: SIZES[set_name][0]]


def _request(
    desk: OrderDesk, rng: random.Random, set_name: str, workflow: str, number: int, served: set[str]
) -> Request:
    condition, make_case = _WORKFLOWS[workflow]
    facts = _pick(desk, rng, set_name, condition, served)
    served.add(facts["customer_id"])
    case = make_case(desk, rng, facts)
    script = _script(rng, set_name, workflow, facts | case.blanks, case.call)
    return Request(f"{set_name}{number + 1:02d}", workflow, facts["customer_id"], script)


def _script(rng: random.Random, set_name: str, workflow: str, blanks: _Facts, call: Call) -> tuple[Line, ...]:
    wording = WORDINGS[workflow][set_name]
    opening = Line(rng.choice(wording.openings).format(**blanks), call)
    chosen = [rng.choice(choices).format(**blanks) for choices in (wording.questions, wording.last_questions)]
    return opening, *(Line(question + BRIEFLY) for question in chosen)


def _pick(desk: OrderDesk, rng: random.Random, set_name: str, condition: str, served: set[str]) -> _Facts:
    """An order that meets the condition, of a customer of this set who was not served yet."""
    query = f"""SELECT customers.*, orders.order_id FROM orders JOIN customers USING (customer_id)
                LEFT JOIN tracking USING (order_id)
                WHERE customers.number % 2 = {"AB".index(set_name)} AND {condition} ORDER BY orders.order_id"""
    return dict(rng.choice([row for row in desk.rows(query) if row["customer_id"] not in served]))


def _about_order(tool: str) -> _MakeCase:
    return lambda desk, rng, facts: _Case({}, Call(tool, {"order_id": facts["order_id"]}))


def _about_customer(tool: str, key: str) -> _MakeCase:
    return lambda desk, rng, facts: _Case({}, Call(tool, {key: facts[key]}))


def _change_address(desk: OrderDesk, rng: random.Random, facts: _Facts) -> _Case:
    place = {"street": f"{rng.randint(1, 99)} {rng.choice(STREETS)}", "city": rng.choice(CITIES)}
    place["zip"] = str(rng.randint(10_000, 99_999))
    blanks = {"address": f"{place['street']}, {place['city']} {place['zip']}"}
    return _Case(blanks, Call("change_address", {"order_id": facts["order_id"], **place}))


def _cancel(desk: OrderDesk, rng: random.Random, facts: _Facts) -> _Case:
    reason = rng.choice(CANCEL_REASONS)
    return _Case({"reason": reason}, Call("cancel_order", {"order_id": facts["order_id"], "reason": reason}))


def _return(desk: OrderDesk, rng: random.Random, facts: _Facts) -> _Case:
    item = rng.choice(_items(desk, facts["order_id"]))
    arguments = {"order_id": facts["order_id"], "item_id": item["item_id"]}
    return _Case({"item": item["product"]}, Call("request_return", arguments))


def _exchange(desk: OrderDesk, rng: random.Random, facts: _Facts) -> _Case:
    item = rng.choice(_items(desk, facts["order_id"]))
    query = "SELECT * FROM products WHERE product = ? AND item_id != ? ORDER BY in_stock = 0, item_id"
    new = desk.rows(query, item["product"], item["item_id"])[0]
    arguments = {"order_id": facts["order_id"], "item_id": item["item_id"], "new_item_id": new["item_id"]}
    return _Case({"item": item["product"], "option": new["option"]}, Call("exchange_item", arguments))


def _items(desk: OrderDesk, order_id: str) -> list[Any]:
    query = "SELECT item_id, product FROM items JOIN products USING (item_id) WHERE order_id = ? ORDER BY item_id"
    return desk.rows(query, order_id)


_RETURNABLE = f"status = 'delivered' AND delivered_on >= '{day(-RETURN_WINDOW_DAYS)}'"
_WORKFLOWS: dict[str, tuple[str, _MakeCase]] = {
    "look up": ("status != 'cancelled'", _about_order("get_order")),
    "track": ("status = 'shipped'", _about_order("track_shipment")),
    "refund status": ("status = 'cancelled'", _about_order("get_refund_status")),
    "change address": ("status = 'pending'", _change_address),
    "cancel": ("status = 'pending'", _cancel),
    "late cancel": ("status = 'shipped'", _cancel),
    "return": (_RETURNABLE, _return),
    "exchange": (_RETURNABLE, _exchange),
    "list orders": ("status != 'cancelled'", _about_customer("list_orders", "customer_id")),
    "my account": ("status != 'cancelled'", _about_customer("find_customer", "email")),
}
