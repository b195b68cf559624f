"""The sentences of scripted customers, in three sets without common sentences: "train" and the held-out "A" and "B".

Each part of a customer's message is chosen separately, so that few messages occur twice. `{it}` is replaced by a
reference to the order or item (`order_by_*`, `item_by_*`); `workflows` fills in the other blanks.
"""

from __future__ import annotations

from precedent_demo.wording_held_out import SET_A, SET_B
from precedent_demo.wording_parts import Wording

TRAIN = Wording(
    greetings=(
        *("", "", "Hello.", "Hi!", "Hi there!", "Hello, {name} here.", "Good morning.", "Good afternoon.", "Hey!"),
        *(
            "Hello, this is {name}.",
            "Dear team!",
            "My name is {name}.",
            "{name} here.",
            "Excuse me.",
            "Hi, I'm {name}.",
        ),
    ),
    order_by_number=(
        *("order {order}", "my order {order}", "order number {order}", "the order {order}", "order no. {order}"),
        *("order #{order}", "{order}", "my order with the number {order}"),
    ),
    order_by_product=(
        *("my {item}", "the {item} I ordered", "my order with the {item}", "the {item} I bought", "my {item} order"),
        *("the order for the {item}", "the {item} that I ordered last week"),
    ),
    item_by_number=(
        *("the {item} from order {order}", "the {item} in order {order}", "my {item} of order {order}"),
        *("the {item} of my order {order}", "my {item} from {order}", "the {item} (order {order})"),
    ),
    item_by_product=("my {item}", "the {item}", "the {item} I bought", "the {item} you sent me", "my new {item}"),
    concerns={
        "status": (
            *("What is the status of {it}?", "How is {it} coming along?", "Could you check the status of {it}?"),
            *("What's going on with {it}?", "Can you tell me the status of {it}?", "Please look up {it} for me."),
            *("Is {it} still pending?", "I would like to know how far {it} is.", "Could you look at {it}, please?"),
        ),
        "total": (
            *("How much did I pay for {it}?", "What is the total of {it}?", "What did {it} cost in all?"),
            *("Can you tell me the total price of {it}?", "I need the amount of {it} for my books."),
            *("What was the sum for {it}?", "How expensive was {it}?"),
        ),
        "address": (
            *("Which address does {it} go to?", "Where are you sending {it}?", "What address is on {it}?"),
            *("Can you check the delivery address of {it}?", "To which address will {it} be sent?"),
            *("Which delivery address do you have for {it}?", "Did I give the right address for {it}?"),
        ),
        "track": (
            *("Where is {it}?", "When will {it} arrive?", "Can you track {it}?", "I'm still waiting for {it}."),
            *("{it} has not arrived yet.", "Please tell me where {it} is now.", "Where is the parcel with {it}?"),
            *("When do I get {it}?", "Could you track the shipment of {it}?", "Has {it} got lost on the way?"),
        ),
        "refund": (
            *("Where is my refund for {it}?", "When do I get my money back for {it}?", "Has {it} been refunded?"),
            *("What about the refund of {it}?", "I'm waiting for the refund of {it}.", "Did you refund {it}?"),
            *("How is the refund for {it} going?", "You owe me the money for {it}.", "Is the refund of {it} paid?"),
        ),
        "change address": (
            *("Please send {it} to {address}.", "I moved. {it} should go to {address}.", "Ship {it} to {address}."),
            *("Can you change the address of {it} to {address}?", "I need {it} delivered to {address}."),
            *("The address of {it} is wrong, it must be {address}.", "Could {it} be sent to {address} instead?"),
            *("My new address is {address}. Please use it for {it}.", "I want {it} to go to {address}."),
        ),
        "cancel": (
            *("Please cancel {it}.", "I want to cancel {it}.", "Can you cancel {it}?", "I'd like to cancel {it}."),
            *("Could you please cancel {it} for me?", "Cancel {it}, please.", "I need to cancel {it}."),
            *("Is it possible to cancel {it}?", "{it} must be cancelled.", "Please stop {it}."),
        ),
        "return": (
            *("I want to return {it}.", "I'd like to send back {it}.", "Can I return {it}?", "How do I return {it}?"),
            *("Please take back {it}.", "I don't like {it} and want to return it.", "I wish to give back {it}."),
            *("{it} is not what I wanted, I want to return it.", "I need to return {it}.", "Can I send {it} back?"),
        ),
        "exchange": (
            *(
                "I want to exchange {it} for {option}.",
                "Can I swap {it} for {option}?",
                "I'd rather have {it} in {option}.",
            ),
            *("Please exchange {it}, I need {option}.", "Could you change {it} to {option}?"),
            *("I'd like {option} instead for {it}.", "I need to exchange {it}: {option}, please."),
            *("I chose wrongly: {it} should be {option}.", "Please swap {it}. I want {option}."),
        ),
        "list orders": (
            *(
                "Which orders do I have?",
                "Please list my orders.",
                "What have I ordered?",
                "Can you show me all my orders?",
            ),
            *("I'd like to see my orders.", "What orders are in my account?", "Give me a list of my orders, please."),
        ),
        "my address": (
            *("Which address do you have for me?", "What is my address in your files?", "Is my address right?"),
            *("Please check the address in my account.", "Can you tell me the address that you have on file?"),
        ),
        "my number": (
            *("What is my customer number?", "I forgot my customer number.", "Can you look up my customer number?"),
            *("Please tell me my customer number.", "I need my customer number."),
        ),
    },
    reasons={
        "ordered by mistake": (
            *(
                "I ordered it by mistake.",
                "It was a mistake.",
                "I clicked the wrong button.",
                "I ordered the wrong thing.",
            ),
            *("That was an accident.", "I ordered twice by mistake.", "I bought it by accident.", "I made an error."),
        ),
        "no longer needed": (
            *("I don't need it any more.", "I no longer need it.", "I changed my mind.", "I found it elsewhere."),
            *("I have no use for it now.", "It is no longer needed.", "I got one as a present.", "My plans changed."),
        ),
    },
    emails=(
        *("My email is {email}.", "I am {email}.", "My address is {email}.", "The email is {email}.", "It's {email}."),
        *("You can find me under {email}.", "I ordered with {email}.", "My account is {email}.", "Email: {email}"),
        *("I'm registered as {email}.", "I use {email}."),
    ),
    numbers=(
        *("The order number is {order}.", "It's {order}.", "Order {order}.", "{order}", "The number is {order}."),
        *("My order number is {order}.", "That is order {order}.", "Number {order}, I think.", "Sure, {order}."),
    ),
    corrections=(
        *("Sorry, it is {email}.", "Oh, I meant {email}.", "A typo, it's {email}.", "Then try {email}."),
        *("Oops, {email}.", "I wrote it wrong: {email}", "The right one is {email}.", "Sorry: {email}"),
    ),
    agreements=(
        *("Yes.", "Yes, please.", "Yes, go ahead.", "Sure.", "Please do.", "Yes, that's right.", "OK, do it."),
        *("Yes please!", "That is correct.", "Go ahead.", "Right, do that.", "Yes, thank you."),
    ),
    refusals=(
        *(
            "No, leave it.",
            "No, thank you.",
            "No, I changed my mind.",
            "Wait, no.",
            "Better not.",
            "No, don't do that.",
        ),
        *("No, keep it as it is.", "Stop, I want to think about it.", "No, not now."),
    ),
    questions={
        "status": ("What is its status?", "And what is the status?", "Is it on the way?", "How far is it?"),
        "total": ("What is the total?", "How much was it in all?", "And what did I pay?", "What did it cost?"),
        "address": ("Which address does it go to?", "Where does it go?", "And which address is on it?"),
        "carrier": (
            "Who brings it?",
            "Which carrier is it?",
            "With which company does it come?",
            "Who has the parcel?",
        ),
        "method": ("How do I get the money?", "Where does the money go?", "How is it paid back?", "By which way?"),
        "due": ("When will I have the money?", "By when?", "And when is it paid?", "How long does the refund take?"),
        "send_by": ("Until when must I send it?", "By when do I have to post it?", "How much time do I have?"),
        "number": (
            "What is the number for the parcel?",
            "Which number do I write on it?",
            "What is the return number?",
        ),
        "my number": ("And what is my customer number?", "Which customer number do I have?"),
        "my address": ("And my address?", "Which address is in my account?", "Where do I live, as you know it?"),
    },
    second_concerns={
        "cancel": (
            "Then please cancel it. {reason}",
            "{reason} Can you cancel it?",
            "Please cancel it, then. {reason}",
        ),
        "change address": (
            *("Please send it to {address}.", "Then change the address to {address}."),
            *("It should go to {address} instead.", "Can it go to {address}?"),
        ),
        "return": (
            "I want to return the {item}.",
            "Then I'd like to send back the {item}.",
            "Please take the {item} back.",
        ),
    },
)

WORDINGS = {"train": TRAIN, "A": SET_A, "B": SET_B}
