"""What scripted customers say: for each workflow and request set its own openings, questions and last questions.

Set A and set B share no sentence. The questions are worded so that a model of 135 million parameters can answer them
from the tool's result; the blanks are filled in by `workflows`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wording:
    """The sentences of one workflow in one set: how it opens, what is asked about the result, what is asked last."""

    openings: tuple[str, ...]
    questions: tuple[str, ...]
    last_questions: tuple[str, ...]


WORDINGS: dict[str, dict[str, Wording]] = {
    "look up": {
        "A": Wording(
            ("Hello, this is {name}. What is in my order {order_id}?", "{name} here. Please look up order {order_id}."),
            ("Which items are in my order, and what do they cost?", "What did I order, and what is the total?"),
            ("Which address will it be sent to?", "What is the status of order {order_id}?"),
        ),
        "B": Wording(
            (
                "Good day, could you check order {order_id} for {name}?",
                "I forgot what I bought. My order is {order_id}.",
            ),
            ("What have I bought, and how much was it in all?", "Can you name the items and their prices?"),
            ("How far along is my order now?", "To what address does it go?"),
        ),
    },
    "track": {
        "A": Wording(
            ("Hello, where is my parcel? The order is {order_id}.", "{name} here. Please track order {order_id}."),
            ("Where is my order now, and when will it arrive?", "When is my order due?"),
            ("Which carrier brings it?", "What should I tell my neighbour about the parcel?"),
        ),
        "B": Wording(
            ("I am still waiting for {order_id}. Has it got lost?", "Hi, {name} again. How far has {order_id} come?"),
            ("At which place is the parcel, and what day does it get here?", "On which date can I expect the parcel?"),
            ("Who delivers the parcel?", "Is the parcel already on its way?"),
        ),
    },
    "refund status": {
        "A": Wording(
            ("Hello, I wait for the refund of order {order_id}.", "{name} here. Is my refund for {order_id} paid?"),
            ("How much is my refund, and when is it due?", "What is the status of my refund?"),
            ("How is the refund paid?", "What is the id of my refund?"),
        ),
        "B": Wording(
            (
                "I cancelled {order_id} some days ago. What about my money?",
                "My name is {name}. Did you pay back {order_id}?",
            ),
            ("What sum do I get back, and on what day?", "How far is the repayment?"),
            ("Where does the money go?", "Under which number do you keep the repayment?"),
        ),
    },
    "change address": {
        "A": Wording(
            (
                "I moved. Please send order {order_id} to {address}.",
                "{name} here. Order {order_id} must go to {address}.",
            ),
            ("Where will my order be sent now?", "What is the new address of my order?"),
            ("Is order {order_id} still pending?", "Which order did you change?"),
        ),
        "B": Wording(
            (
                "My parcel {order_id} should be brought to {address}.",
                "Could {order_id} be delivered to {address} instead?",
            ),
            ("To which place does the parcel go from now on?", "Which street and city do you have for me?"),
            ("What is the number of the order that goes there?", "Has the parcel left yet?"),
        ),
    },
    "cancel": {
        "A": Wording(
            ("Please cancel my order {order_id}, it is {reason}.", "{name} here. Cancel {order_id}: it was {reason}."),
            ("How much do I get back, and when?", "What happens with my order and my money?"),
            ("When will I get my money?", "How will I be paid back?"),
        ),
        "B": Wording(
            ("I do not want {order_id} any more, it is {reason}.", "Could you stop order {order_id}? It was {reason}."),
            ("What sum will you return to me, and by what date?", "Is the order stopped, and what do I get for it?"),
            ("By which way does the sum come back?", "What day can I expect the sum?"),
        ),
    },
    "late cancel": {
        "A": Wording(
            (
                "Please cancel order {order_id}, {name}. It is {reason}.",
                "I want to cancel {order_id}, it was {reason}.",
            ),
            ("Why can you not cancel my order?", "Can my order be cancelled?"),
            ("What is the status of my order?", "What can I do now?"),
        ),
        "B": Wording(
            ("Is it too late to call off {order_id}? It is {reason}.", "{order_id} was {reason}, please take it back."),
            ("What keeps you from calling it off?", "Did it work, and if not, why?"),
            ("Has my parcel been sent out?", "What do you advise me to do?"),
        ),
    },
    "return": {
        "A": Wording(
            ("I want to return the {item} of order {order_id}.", "{name} here. The {item} of {order_id} goes back."),
            ("How much do I get back, and until when must I send it?", "What must I do now, and by what day?"),
            ("What is the number of my return?", "Which item do I send back?"),
        ),
        "B": Wording(
            (
                "The {item} in {order_id} is not what I hoped for.",
                "Could you take back the {item}? It came with {order_id}.",
            ),
            ("What will I be paid for it, and what is the last day to post it?", "When do I have to post the parcel?"),
            ("Which number do I write on the parcel?", "What exactly do I put into the parcel?"),
        ),
    },
    "exchange": {
        "A": Wording(
            (
                "I want to exchange the {item} of {order_id} for {option}.",
                "{name} here. Please swap my {item} for {option}.",
            ),
            ("Which item do I get, and what must I pay?", "What do I send back, and until when?"),
            ("What is the number of my exchange?", "When must I send the old item?"),
        ),
        "B": Wording(
            ("My {item} from {order_id} should rather be {option}.", "Can I have {option} instead of the {item}?"),
            ("What will you send me, and does it cost extra?", "By what day do you need the old one back?"),
            ("What do I write on the box?", "What is the last day to post it?"),
        ),
    },
    "list orders": {
        "A": Wording(
            ("Hello, this is {name}. What have I ordered?", "Please list my orders. I am customer {customer_id}."),
            ("Which orders do I have, and what is their status?", "How many orders do I have?"),
            ("What is the status of my first order?", "What is the number of my last order?"),
        ),
        "B": Wording(
            ("I lost track of my purchases, says {name}.", "Could you go through my purchases? I am {customer_id}."),
            ("What purchases did you find, and how far are they?", "Can you name my purchases?"),
            ("How far is the oldest one?", "Which one is the newest?"),
        ),
    },
    "my account": {
        "A": Wording(
            ("Hello, is my address right? My email is {email}.", "{name} here, {email}. Please look me up."),
            ("Which address do you have for me?", "What is my customer number?"),
            ("Under which name am I known?", "In which city do I live?"),
        ),
        "B": Wording(
            ("I forgot my customer number. I write from {email}.", "Do you know where I live? I use {email}."),
            ("What number do I have with you?", "Where would you send a parcel to?"),
            ("What is my full name in your files?", "Which street is on file for me?"),
        ),
    },
}
