"""The expert's sentences, with blanks for the results of tools."""

from __future__ import annotations

IDENTIFY_ORDER = ("May I have the order number or your email?", "What is the order number, or your email?")
IDENTIFY_CUSTOMER = ("May I have your email?", "What is your email, please?")
NO_CUSTOMER = ("I find no customer with this email. Could you check it?", "This email is unknown. Could you check it?")

ANSWERS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "status": (("Order {order} is {status}.", "The status of order {order} is {status}."), ("status",)),
    "total": (("The total of order {order} is {total}.", "Order {order} was {total} in all."), ("total",)),
    "address": (("Order {order} goes to {address}.", "The address of order {order} is {address}."), ("address",)),
    "on its way": (
        ("Order {order} is in {place} and is due on {due}.", "It is due on {due}. Order {order} is now in {place}."),
        ("place", "due"),
    ),
    "arrived": (
        ("Order {order} was delivered on {delivered}.", "According to {carrier}, it was delivered on {delivered}."),
        ("delivered",),
    ),
    "no shipment": (
        ("Order {order} is {status} and has no shipment yet.", "It is still {status}, so there is no shipment yet."),
        ("status",),
    ),
    "processing": (
        ("Your refund of {amount} is being processed and due on {due}.", "{amount} will be refunded on {due}."),
        ("amount", "due"),
    ),
    "paid": (("Your refund of {amount} was paid on {due}.", "{amount} was refunded on {due}."), ("amount", "due")),
    "cancelled": (
        ("Order {order} is cancelled. You get {refund} back.", "I have cancelled order {order} and refund {refund}."),
        ("refund",),
    ),
    "address changed": (
        ("Order {order} now goes to {address}.", "Done, order {order} will be sent to {address}."),
        ("address",),
    ),
    "returned": (
        ("Please send the {name} back. You get {refund}.", "The return is open, and you get {refund} back."),
        ("refund",),
    ),
    "exchanged": (
        ("You get the {new_item}. Please send the old one back.", "The exchange is open. You get the {new_item}."),
        ("new_item",),
    ),
    "stays": (("All right, order {order} stays as it is.", "Then I change nothing."), ()),
    "too late to cancel": (
        ("Order {order} is {status}, so it cannot be cancelled.", "I cannot cancel it: order {order} is {status}."),
        ("status",),
    ),
    "too late to change": (
        (
            "Order {order} is {status}, so its address cannot be changed.",
            "I cannot change it: order {order} is {status}.",
        ),
        ("status",),
    ),
    "too early to return": (
        ("Order {order} is {status}, so nothing can be sent back yet.", "I cannot take it back yet: it is {status}."),
        ("status",),
    ),
    "returns closed": (
        ("Returns for order {order} {returns}.", "I cannot take it back: returns for order {order} {returns}."),
        ("returns",),
    ),
    "out of stock": (
        ("The {product}, {option} is out of stock.", "I am sorry, {option} is out of stock."),
        ("option",),
    ),
    "one order": (("You have one order: {orders}.", "There is one order: {orders}."), ("orders",)),
    "orders": (("You have {count} orders: {orders}.", "There are {count} orders: {orders}."), ("orders",)),
    "my address": (("Your address is {address}.", "We have the address {address}."), ("address",)),
    "my number": (("Your customer number is {customer}.", "You are customer {customer}."), ("customer",)),
    "carrier": (("{carrier} brings it.", "The carrier is {carrier}."), ("carrier",)),
    "method": (("The money is paid back by {method}.", "You get it by {method}."), ("method",)),
    "refund due": (("The money is due on {due}.", "You get it by {due}."), ("due",)),
    "send_by": (("Please send it by {send_by}.", "The last day is {send_by}."), ("send_by",)),
    "return number": (("The number is {number}.", "Please write {number} on it."), ("number",)),
}
"""For each kind of answer: sentences of the same meaning, and the blanks that the customer must be told."""

CONFIRM = {
    "cancel": (
        "Order {order} is {status}, {total} in all. Shall I cancel it?",
        "Shall I cancel order {order} for {total}?",
    ),
    "change address": ("Shall I send order {order} to {address}?", "So order {order} goes to {address}, right?"),
    "return": ("Shall I open a return of the {name} for {price}?", "You get {price} for the {name}. Shall I go on?"),
    "exchange": ("Shall I swap the {name} for {option}?", "So {option} instead of the {name}, right?"),
}
