"""One agent for several customers: each drafts from its own past only, and only from runs that ended well.

    python examples/tenants.py

It runs without weights, on the model that the library ships for tests: a real, tiny one that follows a script. Put
`ChatPrecedent(model="…", speculation_cache="…")` in its place for your own model; nothing else changes.
"""

from typing import TypedDict

from langchain.agents import create_agent
from langchain_core.messages import AIMessage
from langchain_core.tools import tool

from precedent import ChatPrecedent, SpeculationCache
from precedent.langchain import SpeculationMiddleware
from precedent.testing.embedders import HashEmbedder
from precedent.testing.scripted_model import scripted_model_engine


class Customer(TypedDict):
    """What a run is told of the one it serves."""

    org: str


@tool
def order_status(order_id: str) -> str:
    """Look up the status of an order."""
    return "shipped"


QUESTION = "Where is order 1042?"
SCRIPT = [  # what the model says, and what it has to be told before
    ("user", QUESTION),
    ("assistant", '<tool_call>\n{"name": "order_status", "arguments": {"order_id": "1042"}}\n</tool_call>'),
    ("tool", "shipped"),
    ("assistant", "Your order has left our house and should be with you within three days."),
]

cache = SpeculationCache.open(embedder=HashEmbedder())  # in memory; give a path, and leave the embedder to the default
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
