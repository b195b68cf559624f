"""A LangChain agent with a tool, on a model in this process: only the chat model differs from any other agent.

    python examples/agent.py

A model of 135 million parameters seldom calls a tool by itself; replace it with a larger one.
"""

from langchain.agents import create_agent
from langchain_core.tools import tool

from precedent import ChatPrecedent


@tool
def order_status(order_id: str) -> str:
    """Look up the status of an order."""
    return f'{{"order_id": "{order_id}", "status": "shipped"}}'


llm = ChatPrecedent(
    model="smollm2-135m-instruct",  # or any Hugging Face id or folder
    draft_model="first-layers:4",  # or a smaller model with the same tokenizer
    speculation_cache="agent-cache",  # a folder: the second run of this script drafts from the first
    max_tokens=80,
)
agent = create_agent(llm, tools=[order_status], name="orders")

for message in agent.invoke({"messages": [("user", "What is the status of order W1042? Use the tool.")]})["messages"]:
    message.pretty_print()
