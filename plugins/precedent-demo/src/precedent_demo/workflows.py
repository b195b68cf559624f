"""Generates requests: workflows over the orders of one database, worded with one set of sentences.

The sets "A" and "B" use databases of the split "held-out" and share no customer, order, name or sentence. The set
"train" uses databases of the split "train".
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

from precedent.errors import ConfigError
from precedent_demo.catalogue import CATALOGUES
from precedent_demo.database import RETURN_WINDOW_DAYS, day, new_address
from precedent_demo.desk import CANCEL_REASONS, OrderDesk
from precedent_demo.expert import gold
from precedent_demo.requests import Goal, Request
from precedent_demo.wording import WORDINGS, Wording

SIZES = {"A": (30, 60), "B": (15, 40)}  # requests of the demo: usual, full
SPLITS = {"train": "train", "A": "held-out", "B": "held-out"}


@dataclass(frozen=True, slots=True)
class Workflow:
    """A concern, the SQL condition for its orders, and the questions that may follow."""

    concern: str
    condition: str
    questions: tuple[str, ...] = ()
    second_concern: str = ""
    needs_stock: bool | None = None


_OPEN = f"status = 'delivered' AND delivered_on >= '{day(-RETURN_WINDOW_DAYS)}'"
_CLOSED = f"(status = 'shipped' OR (status = 'delivered' AND delivered_on < '{day(-RETURN_WINDOW_DAYS)}'))"
_GONE = "status IN ('shipped', 'delivered')"
_ANY = "status != 'cancelled'"

WORKFLOWS: dict[str, Workflow] = {
    "status": Workflow("status", "1", ("total", "address")),
    "total": Workflow("total", "1", ("status", "address")),
    "order address": Workflow("address", _ANY, ("status", "total")),
    "track": Workflow("track", _GONE, ("carrier",)),
    "track too early": Workflow("track", "status = 'pending'"),
    "refund": Workflow("refund", "status = 'cancelled'", ("method",)),
    "change address": Workflow("change address", "status = 'pending'"),
    "late change": Workflow("change address", _GONE),
    "cancel": Workflow("cancel", "status = 'pending'", ("method", "due")),
    "late cancel": Workflow("cancel", _GONE),
    "return": Workflow("return", _OPEN, ("send_by", "number")),
    "late return": Workflow("return", _CLOSED),
    "exchange": Workflow("exchange", _OPEN, ("send_by", "number"), needs_stock=True),
    "out of stock": Workflow("exchange", _OPEN, needs_stock=False),
    "list orders": Workflow("list orders", "1", ("my number",)),
    "my address": Workflow("my address", "1", ("my number",)),
    "my number": Workflow("my number", "1", ("my address",)),
    "look up, cancel": Workflow("status", "status = 'pending'", ("due",), "cancel"),
    "look up, change": Workflow("total", "status = 'pending'", (), "change address"),
    "look up, return": Workflow("status", _OPEN, ("send_by",), "return"),
}
ABOUT_CUSTOMER = ("list orders", "my address", "my number")
CHANGING = ("change address", "cancel", "return", "exchange")


def generate_requests(set_name: str, seed: int, desk: OrderDesk) -> Iterator[Request]:
    """Endless requests, one workflow after the other; a customer returns only when no new one fits.

    `desk` must hold a database of the set's split (`SPLITS`). Raises ConfigError for an unknown set name.
    """
    if set_name not in WORDINGS:
        raise ConfigError(f"there is no set of wordings {set_name!r}; choose from {', '.join(WORDINGS)}")
    writer = _Writer(set_name, random.Random(f"requests {set_name} {seed}"), desk)
    names = list(WORKFLOWS)
    return (writer.request(f"{set_name}{i + 1:02d}", names[i % len(names)]) for i in count())


class _Writer:
    def __init__(self, set_name: str, rng: random.Random, desk: OrderDesk) -> None:
        self._set, self._rng, self._desk = set_name, rng, desk
        self._wording: Wording = WORDINGS[set_name]
        self._served: set[str] = set()

    def request(self, request_id: str, name: str) -> Request:
        workflow = WORKFLOWS[name]
        row = self._pick(workflow)
        self._served.add(row["customer_id"])
        goal = self._goal(workflow, row)
        blanks = {"name": row["name"].split()[0], "email": goal.email, "order": goal.order, "item": goal.product}
        blanks |= {"option": goal.option, "address": goal.address}
        calls, facts = gold(goal, self._desk)
        opening, replies, remarks = (write(goal, blanks) for write in (self._opening, self._replies, self._remarks))
        return Request(request_id, name, row["customer_id"], opening, replies, remarks, calls, facts, goal)

    def _pick(self, workflow: Workflow) -> Any:
        """An order that fits, with one of its items, if possible of a customer who was not served yet."""
        stock = "1"
        if workflow.needs_stock is not None:
            compared = ">" if workflow.needs_stock else "="
            stock = f"""EXISTS (SELECT 1 FROM products other WHERE other.product = products.product
                        AND other.item_id != products.item_id AND other.in_stock {compared} 0)"""
        mine = f"customers.number % 2 = {'AB'.index(self._set)}" if self._set in SIZES else "1"
        query = f"""SELECT customers.*, orders.order_id, items.item_id, product FROM orders
                    JOIN customers USING (customer_id) JOIN items USING (order_id) JOIN products USING (item_id)
                    LEFT JOIN tracking USING (order_id)
                    WHERE {mine} AND {workflow.condition} AND {stock} ORDER BY order_id, item_id"""
        rows = self._desk.rows(query)
        fresh = [row for row in rows if row["customer_id"] not in self._served]
        return self._rng.choice(fresh or rows)

    def _goal(self, workflow: Workflow, row: Any) -> Goal:
        rng, email = self._rng, row["email"]
        about_customer = workflow.concern in ABOUT_CUSTOMER
        ways = ("email", "asked email", "wrong email") if about_customer else tuple(_WEIGHTS)
        found_by = rng.choices(ways, [_WEIGHTS[way] for way in ways])[0]
        concerns = {workflow.concern, workflow.second_concern}
        goal = Goal(
            concern=workflow.concern,
            found_by=found_by,
            email=email,
            order=row["order_id"],
            product=row["product"],
            wrong_email=self._misspelt(email) if found_by == "wrong email" else "",
            item=row["item_id"] if concerns & {"return", "exchange"} else "",
            option=self._option(row, workflow) if "exchange" in concerns else "",
            address=new_address(rng, CATALOGUES[SPLITS[self._set]]) if "change address" in concerns else "",
            reason=rng.choice(CANCEL_REASONS) if "cancel" in concerns else "",
            second_concern=workflow.second_concern,
            agrees=rng.random() > 0.15 or not concerns & set(CHANGING),
        )
        asks = goal.agrees and workflow.questions and rng.random() < 0.6
        return replace(goal, questions=(rng.choice(workflow.questions),)) if asks else goal

    def _option(self, row: Any, workflow: Workflow) -> str:
        compared = ">" if workflow.needs_stock else "="
        query = f"SELECT option FROM products WHERE product = ? AND item_id != ? AND in_stock {compared} 0"
        return str(self._rng.choice(self._desk.rows(query, row["product"], row["item_id"]))["option"])

    def _misspelt(self, email: str) -> str:
        mailbox, host = email.split("@")
        position = self._rng.randrange(1, len(mailbox) - 1)
        return f"{mailbox[:position]}{mailbox[position + 1 :]}@{host}"

    def _opening(self, goal: Goal, blanks: dict[str, str]) -> str:
        say, words = self._say, self._wording
        parts = [say(words.concerns[goal.concern], blanks | {"it": self._reference(goal, blanks)})]
        if goal.concern == "cancel":
            parts.append(say(words.reasons[goal.reason], blanks))
        if goal.found_by in ("email", "wrong email"):
            said = say(words.emails, blanks | {"email": goal.wrong_email or goal.email})
            parts.insert(self._rng.choice((0, len(parts), len(parts))), said)
        greeting = self._rng.choice(words.greetings).format(**blanks)
        return " ".join([greeting, *parts] if greeting else parts)

    def _reference(self, goal: Goal, blanks: dict[str, str]) -> str:
        words, by_number = self._wording, goal.found_by == "number"
        if goal.concern in ("return", "exchange"):
            return self._rng.choice(words.item_by_number if by_number else words.item_by_product).format(**blanks)
        return self._rng.choice(words.order_by_number if by_number else words.order_by_product).format(**blanks)

    def _replies(self, goal: Goal, blanks: dict[str, str]) -> dict[str, str]:
        words, replies = self._wording, {}
        identify = {"asked number": words.numbers, "asked email": words.emails, "wrong email": words.corrections}
        if goal.found_by in identify:
            replies["identify"] = self._say(identify[goal.found_by], blanks)
        if {goal.concern, goal.second_concern} & set(CHANGING):
            replies["confirm"] = self._say(words.agreements if goal.agrees else words.refusals, blanks)
        return replies

    def _remarks(self, goal: Goal, blanks: dict[str, str]) -> tuple[str, ...]:
        words, remarks = self._wording, []
        if goal.second_concern:
            reason = self._say(words.reasons[goal.reason], blanks) if goal.reason else ""
            remarks.append(self._say(words.second_concerns[goal.second_concern], blanks | {"reason": reason}))
        remarks += [self._say(words.questions[question], blanks) for question in goal.questions]
        return tuple(remarks)

    def _say(self, sentences: tuple[str, ...], blanks: dict[str, str]) -> str:
        said = self._rng.choice(sentences).format(**blanks)
        return said[:1].upper() + said[1:] if "@" not in said.split()[0] else said


_WEIGHTS = {"number": 45, "email": 30, "asked number": 8, "asked email": 9, "wrong email": 8}
"""How often, in percent, an order is found in each way."""
