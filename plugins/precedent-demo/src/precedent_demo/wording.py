"""The sentences of scripted customers, in three sets without common sentences: "train" and the held-out "A" and "B".

Each part of a customer's message is chosen separately, so that few messages occur twice. `{it}` is replaced by a
reference to the order or item (`order_by_*`, `item_by_*`); `workflows` fills in the other blanks.
"""

from __future__ import annotations

from dataclasses import dataclass

Sentences = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wording:
    """One set of sentences for the openings, replies and remarks of customers."""

    greetings: Sentences
    order_by_number: Sentences
    order_by_product: Sentences
    item_by_number: Sentences
    item_by_product: Sentences
    concerns: dict[str, Sentences]
    reasons: dict[str, Sentences]
    emails: Sentences
    numbers: Sentences
    corrections: Sentences
    agreements: Sentences
    refusals: Sentences
    questions: dict[str, Sentences]
    second_concerns: dict[str, Sentences]


SET_A = Wording(
    greetings=("Good day.", "Hello again!", "Greetings from {name}."),
    order_by_number=("the order numbered {order}", "my purchase {order}"),
    order_by_product=("the {item} from my last purchase", "the {item} I have ordered from you"),
    item_by_number=("the {item} that came with {order}", "the {item} from my purchase {order}"),
    item_by_product=("the {item} from your shop", "the {item} that I got from you"),
    concerns={
        "status": ("Would you check how {it} is doing?", "Tell me the current status of {it}, please."),
        "total": ("What was the total price for {it}?", "How much was {it} altogether?"),
        "address": ("What is the delivery address of {it}?", "Which address did I enter for {it}?"),
        "track": ("Do you know where {it} is?", "When can I expect the delivery of {it}?"),
        "refund": ("Is there any news about the refund for {it}?", "When will {it} be refunded?"),
        "change address": ("{it} needs a new address: {address}.", "Please deliver {it} to {address} instead."),
        "cancel": ("I'm afraid I have to cancel {it}.", "Would you cancel {it}, please?"),
        "return": ("May I return {it}?", "I'm not happy with {it} and would like to return it."),
        "exchange": ("Would you exchange {it} for {option}?", "I'd prefer {option}. Please exchange {it}."),
        "list orders": ("Could you list all the orders I have?", "What orders do you have for me?"),
        "my address": ("What address is stored for me?", "Could you read me my address?"),
        "my number": ("Could you give me my customer number?", "Which customer number is mine?"),
    },
    reasons={
        "ordered by mistake": ("I placed it by mistake.", "I pressed the wrong button."),
        "no longer needed": ("I don't need it now.", "It is not needed any longer."),
    },
    emails=("My email address is {email}.", "I'm a customer under {email}."),
    numbers=("Yes, it is {order}.", "I have the number {order} here."),
    corrections=("Sorry, that was wrong. It is {email}.", "Ah, it should be {email}."),
    agreements=("Yes, please go ahead.", "Yes, do that please."),
    refusals=("No, I'd rather keep it.", "No, please don't."),
    questions={
        "status": ("What status does it have?", "Is it still at your place?"),
        "total": ("How much is it in total?", "What was the total again?"),
        "address": ("What address will it go to?", "Which address do you send it to?"),
        "carrier": ("Which carrier brings it?", "Who will bring it to me?"),
        "method": ("How will the money be paid?", "How do you pay me back?"),
        "due": ("When will I get the money?", "When is the money due?"),
        "send_by": ("When do I have to send it?", "Until which day can I send it?"),
        "number": ("Which number goes on the parcel?", "What number should I write on the parcel?"),
        "my number": ("And under what customer number?", "What customer number do I have?"),
        "my address": ("What is my address, please?", "And which address do you have?"),
    },
    second_concerns={
        "cancel": ("Then I want it cancelled. {reason}", "I see. {reason} Please cancel it for me."),
        "change address": ("Please change the address to {address}.", "I want it sent to {address}."),
        "return": ("I would like to return the {item}.", "Can you take back the {item}?"),
    },
)

SET_B = Wording(
    greetings=("Good evening.", "Hello there!", "Hi, my name is {name}."),
    order_by_number=("the purchase with number {order}", "my recent order {order}"),
    order_by_product=("the {item} I got from your shop", "my recent order of the {item}"),
    item_by_number=("the {item} I got with order {order}", "my {item} from purchase {order}"),
    item_by_product=("the {item} I received", "the {item} from my order"),
    concerns={
        "status": ("I want to ask about the status of {it}.", "Can you see how far {it} is?"),
        "total": ("Please tell me what {it} cost in total.", "What amount did I pay for {it}?"),
        "address": ("Please check which address {it} is going to.", "What address do you have on {it}?"),
        "track": ("Can you find out where {it} is?", "I wonder when {it} is going to arrive."),
        "refund": ("I have not seen the refund for {it} yet.", "What is happening with the refund for {it}?"),
        "change address": ("Can you deliver {it} to {address}?", "I gave the wrong address. Send {it} to {address}."),
        "cancel": ("I would like you to cancel {it}.", "Can I still cancel {it}?"),
        "return": ("I have decided to return {it}.", "Is it possible to return {it}?"),
        "exchange": ("Can {it} be exchanged for {option}?", "I would like to swap {it} for {option}."),
        "list orders": ("Show me my orders, please.", "I want to know which orders I have."),
        "my address": ("Please read out my address.", "Do you have the right address for me?"),
        "my number": ("I can't find my customer number.", "What customer number have I got?"),
    },
    reasons={
        "ordered by mistake": ("It was ordered by mistake.", "I made a mistake."),
        "no longer needed": ("I do not need it any longer.", "I have changed my mind."),
    },
    emails=("I'm writing from {email}.", "The email of my account is {email}."),
    numbers=("Here it is: {order}.", "My number is {order}."),
    corrections=("My mistake, it is {email}.", "Please try {email}."),
    agreements=("Yes, please do so.", "Yes, I agree."),
    refusals=("No, please leave it as it is.", "No, I don't want that."),
    questions={
        "status": ("And its status?", "Do you know the status?"),
        "total": ("And how much did it cost?", "What was the price in all?"),
        "address": ("And what is the address?", "Where will it be delivered?"),
        "carrier": ("What carrier do you use?", "Who delivers it?"),
        "method": ("In which way do I get the money?", "How will I be paid?"),
        "due": ("And when do I get it?", "When can I expect the money?"),
        "send_by": ("What is the last day to send it?", "By which day must I send it?"),
        "number": ("Is there a number for the parcel?", "What do I write on the parcel?"),
        "my number": ("Please tell me the customer number, too.", "And the customer number?"),
        "my address": ("And the address?", "Please tell me my address, too."),
    },
    second_concerns={
        "cancel": ("In that case, please cancel it. {reason}", "{reason} I want to cancel it."),
        "change address": ("Could you send it to {address}?", "Then send it to {address}, please."),
        "return": ("I want to give back the {item}.", "Can I return the {item}?"),
    },
)


def _framed(frames: Sentences, *parts: str) -> Sentences:
    return tuple(frame.replace("…", part) for part in parts for frame in frames)


_TELL = ("Can you tell me …?", "I would like to know ….", "Please check ….", "I wonder ….")
_YOU = ("Please ….", "Can you …?", "Could you … for me?", "I want you to ….")
_I = ("I want to ….", "I'd like to ….", "Can I …?", "I need to ….")

TRAIN = Wording(
    greetings=(
        *("", "", "Hello.", "Hi!", "Hello, {name} here.", "Good morning.", "Hey!", "Hello, this is {name}."),
        *("Dear team!", "My name is {name}.", "{name} here.", "Excuse me.", "Hi, I'm {name}."),
    ),
    order_by_number=("order {order}", "my order {order}", "order number {order}", "order #{order}"),
    order_by_product=("my {item}", "the {item} I ordered", "my order with the {item}", "the order for the {item}"),
    item_by_number=("the {item} from order {order}", "my {item} of order {order}", "the {item} (order {order})"),
    item_by_product=("my {item}", "the {item}", "the {item} I bought", "the {item} you sent me", "my new {item}"),
    concerns={
        "status": (*_framed(_TELL, "what the status of {it} is", "how far {it} is"), "Is {it} still pending?"),
        "total": (*_framed(_TELL, "what {it} cost in all", "how much I paid for {it}"), "What is the total of {it}?"),
        "address": _framed(_TELL, "which address {it} goes to", "where you are sending {it}"),
        "track": (*_framed(_TELL, "where {it} is now", "when {it} will arrive"), "{it} has not arrived yet."),
        "refund": (*_framed(_TELL, "where my refund for {it} is", "when {it} is paid back"), "Did you refund {it}?"),
        "change address": _framed(_YOU, "send {it} to {address}", "change the address of {it} to {address}"),
        "cancel": _framed(_YOU, "cancel {it}", "stop {it}") + _framed(_I, "cancel {it}"),
        "return": (*_framed(_I, "return {it}", "send back {it}"), "I don't like {it} and want to return it."),
        "exchange": _framed(_I, "exchange {it} for {option}", "have {it} in {option}, not as it is"),
        "list orders": (*_framed(_TELL, "which orders I have", "what I have ordered"), "Please list my orders."),
        "my address": _framed(_TELL, "which address you have for me", "whether my address is right"),
        "my number": (*_framed(_TELL, "what my customer number is"), "I forgot my customer number."),
    },
    reasons={
        "ordered by mistake": ("I ordered it by mistake.", "I clicked the wrong button.", "That was an accident."),
        "no longer needed": ("I don't need it any more.", "I changed my mind.", "I have no use for it now."),
    },
    emails=("My email is {email}.", "I am {email}.", "The email is {email}.", "I ordered with {email}."),
    numbers=("The order number is {order}.", "It's {order}.", "Order {order}.", "{order}", "Sure, {order}."),
    corrections=("Sorry, it is {email}.", "Oh, I meant {email}.", "A typo, it's {email}.", "Oops, {email}."),
    agreements=("Yes.", "Yes, please.", "Yes, go ahead.", "Sure.", "Please do.", "OK, do it.", "That is correct."),
    refusals=("No, leave it.", "No, thank you.", "No, I changed my mind.", "Wait, no.", "Better not.", "No, not now."),
    questions={
        "status": ("What is its status?", "And what is the status?", "Is it on the way?", "How far is it?"),
        "total": ("What is the total?", "How much was it in all?", "And what did I pay?", "What did it cost?"),
        "address": ("Which address does it go to?", "Where does it go?", "And which address is on it?"),
        "carrier": ("Who brings it?", "Which carrier is it?", "Who has the parcel?"),
        "method": ("How do I get the money?", "Where does the money go?", "How is it paid back?", "By which way?"),
        "due": ("When will I have the money?", "By when?", "And when is it paid?", "How long does the refund take?"),
        "send_by": ("Until when must I send it?", "By when do I have to post it?", "How much time do I have?"),
        "number": ("What is the number for the parcel?", "Which number do I write on it?"),
        "my number": ("And what is my customer number?", "Which customer number do I have?"),
        "my address": ("And my address?", "Which address is in my account?"),
    },
    second_concerns={
        "cancel": ("Then please cancel it. {reason}", "{reason} Can you cancel it?"),
        "change address": ("Please send it to {address}.", "Then change the address to {address}."),
        "return": ("I want to return the {item}.", "Please take the {item} back."),
    },
)

WORDINGS = {"train": TRAIN, "A": SET_A, "B": SET_B}
