"""A LangGraph graph with parallel branches that ask one engine at the same time and stream their answers.

    python examples/parallel_graph.py

It needs no weights: it runs on a tiny real model from the library's tests that follows a script. To use your own model,
replace it with `ChatPrecedent(model="…")`; nothing else changes.
"""

import operator
from typing import Annotated, TypedDict

from langgraph.graph import END, START, StateGraph

from precedent import ChatPrecedent
from precedent_testing.scripted_model import scripted_model_engine

ANSWERS = {
    "sum up": "A fair price and good quality, but be patient with the service.",
    "price": "The price is fair: 40 euros for two years of use.",
    "quality": "The quality is good: the seams hold, the zip runs smoothly.",
    "service": "The service is slow: two weeks for a reply.",
}


def script(prompt: str) -> str:
    """The model's answer to the last question."""
    question = prompt.rsplit("<|im_start|>user\n", 1)[-1]
    return next(answer for topic, answer in ANSWERS.items() if topic in question)


llm = ChatPrecedent.from_engine(scripted_model_engine(script), max_tokens=60)


class Review(TypedDict):
    """The product, the branches' findings, and the verdict."""

    product: str
    findings: Annotated[list[str], operator.add]
    verdict: str


def look_at(topic: str):
    """A branch that asks about one topic."""

    def node(state: Review) -> dict[str, list[str]]:
        return {"findings": [llm.invoke(f"In one sentence: the {topic} of {state['product']}?").text]}

    return node


def judge(state: Review) -> dict[str, str]:
    """The node that joins the branches."""
    return {"verdict": llm.invoke("Please sum up: " + " ".join(state["findings"])).text}


graph = StateGraph(Review)
graph.add_node("judge", judge)
for topic in ("price", "quality", "service"):
    graph.add_node(topic, look_at(topic))
    graph.add_edge(START, topic)
    graph.add_edge(topic, "judge")
graph.add_edge("judge", END)

pieces: dict[str, list[str]] = {}
for chunk, metadata in graph.compile().stream({"product": "a rucksack"}, stream_mode="messages"):
    pieces.setdefault(metadata["langgraph_node"], []).append(chunk.text)
for node, texts in pieces.items():
    print(f"{node:8} in {len(texts)} chunks: {''.join(texts)}")

metrics = llm.engine.metrics()
print(f"\n{metrics.generation_tokens} tokens in {metrics.num_steps} forwards of the model, which the branches shared")
llm.engine.close()
