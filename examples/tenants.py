"""One agent for several customers: each drafts only from its own past, and only from runs that ended well.

    python examples/tenants.py

It needs no weights: it runs on a tiny real model from the library's tests that follows a script. To use your own model,
replace it with `ChatPrecedent(model="…", speculation_cache="…")`; nothing else changes.
"""

from typing import TypedDict

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

from precedent import ChatPrecedent, SpeculationCache
from precedent.langchain import SpeculationMiddleware
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine


class Customer(TypedDict):
    """The context of a run: the customer that it serves."""

    org: str


@tool
def order_status(order_id: str) -> str:
    """Look up the status of an order."""
    return "shipped"


QUESTION = "Where is order 1042?"
SCRIPT = [  # the model's answers, and the messages that must precede them
    ("user", QUESTION),
    ("assistant", '<tool_call>\n{"name": "order_status", "arguments": {"order_id": "1042"}}\n</tool_call>'),
    ("tool", "shipped"),
    ("assistant", "Your order has left our house and should be with you within three days."),
]

cache = SpeculationCache.open(embedder=HashEmbedder())  # in memory; in practice, give a path and no embedder
llm = ChatPrecedent.from_engine(scripted_model_engine(SCRIPT, cache=cache))
agent = create_agent(
    llm,
    tools=[order_status],
    name="desk",
    context_schema=Customer,
    middleware=[SpeculationMiddleware(tenant=lambda runtime: runtime.context["org"], workflow="order-status")],
)

for org in ("acme", "acme", "bolt"):
    run = agent.invoke({"messages": [("user", QUESTION)]}, context={"org": org})
    said = [message for message in run["messages"] if isinstance(message, AIMessage)]
    recalled = [m.response_metadata["speculation"]["accepted_by_source"].get("recall", 0) for m in said]
    tokens = sum(message.usage_metadata["output_tokens"] for message in said)
    print(f"{org}: {said[-1].text!r}, {sum(recalled)} of {tokens} tokens recalled from its own past")

for tenant in cache.stats().tenants:
    print(f"the cache holds {tenant.records} completions of {tenant.tenant}")
llm.engine.close()
