"""An agent whose tools start before the model has asked for them, once it has seen others like it.

    python examples/run_ahead.py

It needs no weights: it runs on a tiny real model from the library's tests that follows a script. To use your own model,
replace it with `ChatPrecedent(model="…", speculation_cache="…")`, or with any other chat model.
"""

import json
import re
import time

from langchain.agents import create_agent
from langchain_core.tools import tool

from precedent import ChatPrecedent, SpeculationCache
from precedent_run_ahead import RunAheadMiddleware, read_only
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine


@read_only  # your word: it changes nothing, and reading it early, or in vain, does no harm
@tool
def look_up_order(order: str) -> str:
    """Look up an order."""
    time.sleep(0.4)
    return json.dumps({"order": order, "status": "shipped"})


def answer(prompt: str) -> str:
    """What the model says: it looks up the order that the user names, then tells its status."""
    order = re.findall(r"order (W\d+)", prompt)[-1]
    if '"status"' in prompt.rsplit("<|im_start|>user", 1)[-1]:
        return f"Order {order} has left our house and should be with you within three days."
    return f'<tool_call>\n{{"name": "look_up_order", "arguments": {{"order": "{order}"}}}}\n</tool_call>'


cache = SpeculationCache.open(embedder=HashEmbedder())  # in memory; in practice, give a path and no embedder
llm = ChatPrecedent.from_engine(scripted_model_engine(answer, cache=cache))
ahead = RunAheadMiddleware(cache=cache)
agent = create_agent(llm, tools=[look_up_order], name="desk", middleware=[ahead])

for order in ("W1042", "W1043", "W1044", "W1045"):
    before = ahead.ledger.counts.by_source.get("memory", [0, 0])[1]
    run = agent.invoke({"messages": [("user", f"Where is order {order}?")]})
    known = ahead.ledger.counts.by_source.get("memory", [0, 0])[1] > before
    print(f"{order}: {run['messages'][-1].text} ({'read ahead' if known else 'read when asked'})")

counts = ahead.ledger.counts
print(f"{counts.used} of {counts.started} calls that ran ahead were used, for {counts.calls} calls of the model")
llm.engine.close()
