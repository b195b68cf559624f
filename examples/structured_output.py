"""An answer that always fits a JSON Schema, and a tool call that is always made: a grammar enforces both.

python examples/structured_output.py
"""

from typing import Literal

from pydantic import BaseModel, Field

from precedent import ChatPrecedent


class Ticket(BaseModel):
    """What a complaint is about."""

    product: str = Field(max_length=30)
    problem: Literal["damaged", "late", "wrong item", "other"]
    wants_refund: bool


def open_ticket(order: str, urgent: bool) -> str:
    """Open a ticket for an order."""
    return f"ticket for {order}"


COMPLAINT = "My blue kettle came with a broken lid. I want my money back. Order W1042."

llm = ChatPrecedent(model="smollm2-135m-instruct", max_tokens=120)
answer = llm.with_structured_output(Ticket, include_raw=True).invoke(
    f"Describe this complaint as JSON with the keys product, problem and wants_refund. {COMPLAINT}"
)
stats = answer["raw"].response_metadata["speculation"]
print(repr(answer["parsed"]))
print(
    f"  {answer['raw'].usage_metadata['output_tokens']} tokens in {stats['num_steps']} target forwards; "
    f"accepted from {stats['accepted_by_source'] or 'nobody'}\n"
)

message = llm.bind_tools([open_ticket], tool_choice="open_ticket").invoke(COMPLAINT)
print(message.tool_calls[0]["name"], message.tool_calls[0]["args"])
