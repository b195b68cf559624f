"""Features of a local chat model: `ChatPrecedent` and ChatHuggingFace on one tiny model.

    pip install langchain-huggingface
    python benchmarks/langchain_features.py

Nothing is downloaded. Prints the table of docs/explanation/chat-models.md.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import warnings
from argparse import ArgumentParser
from collections.abc import Callable
from typing import Any, Literal
from unittest import mock

import torch
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase, pipeline

from precedent import ChatPrecedent
from precedent_testing.scripted_model import scripted_tokenizer
from precedent_testing.tiny_models import tiny_causal_lm

MOST = 24


@tool
def look_up(number: Literal["7"]) -> str:
    """Look up an order by its number."""
    return number


class Order(BaseModel):
    """An order."""

    number: int


CALLED = AIMessage("", tool_calls=[{"name": "look_up", "args": {"number": "7"}, "id": "1"}])
AFTER_A_TOOL = [HumanMessage("hi"), CALLED, ToolMessage("open", tool_call_id="1")]


def tools_reach_the_prompt(model: BaseChatModel) -> bool:
    seen, original = list[str](), PreTrainedTokenizerBase.apply_chat_template

    def spy(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        seen.append(str(made))
        return made

    with mock.patch.object(PreTrainedTokenizerBase, "apply_chat_template", spy):
        model.bind_tools([look_up]).invoke("hi")
    return any("look_up" in text for text in seen)


def stop_is_obeyed(model: BaseChatModel) -> bool:
    text = model.invoke("hi").text
    return text[4:6] not in model.invoke("hi", stop=[text[4:6]]).text


def streams_async(model: BaseChatModel) -> bool:
    async def chunks() -> int:
        return len([chunk async for chunk in model.astream("hi")])

    return asyncio.run(chunks()) > 2


def a_seed_fixes_the_text(model: BaseChatModel) -> bool:
    texts = {model.invoke("hi", temperature=1.0, seed=3).text for _ in range(3)}
    return len(texts) == 1 and model.invoke("hi", temperature=1.0, seed=4).text not in texts


def calls_a_tool(model: BaseChatModel) -> bool:
    return bool(model.bind_tools([look_up], tool_choice="any").invoke("hi", max_tokens=10 * MOST).tool_calls)


FEATURES: dict[str, Callable[[BaseChatModel], bool]] = {
    "`invoke`, `batch`": lambda model: len(model.batch(["hi", "ho"])) == 2,
    "`stream`": lambda model: len(list(model.stream("hi"))) > 2,
    "`ainvoke`": lambda model: bool(asyncio.run(model.ainvoke("hi")).text),
    "`astream`": streams_async,
    "`max_tokens` of a call": lambda model: len(model.get_token_ids(model.invoke("hi", max_tokens=2).text)) <= 2,
    "`stop` of a call": stop_is_obeyed,
    "`seed` of a call": a_seed_fixes_the_text,
    "tools reach the prompt": tools_reach_the_prompt,
    "tool results in the history": lambda model: bool(model.invoke(AFTER_A_TOOL)),
    '`tool_choice="any"`': calls_a_tool,
    "structured output": lambda model: isinstance(model.with_structured_output(Order).invoke("hi"), Order),
    "`usage_metadata`": lambda model: bool(model.invoke("hi").usage_metadata),
    "usage when streaming": lambda model: any(chunk.usage_metadata for chunk in model.stream("hi")),
    "`model_name` in `response_metadata`": lambda model: "model_name" in model.invoke("hi").response_metadata,
    "`logprobs`": lambda model: bool(model.invoke("hi", logprobs=True).response_metadata.get("logprobs")),
    "`profile`": lambda model: bool(model.profile),
    "tokens counted by its own template": lambda model: model.get_num_tokens_from_messages([HumanMessage("hi")]) > 4,
}


def outcome(feature: Callable[[BaseChatModel], bool], model: BaseChatModel) -> str:
    try:
        return "yes" if feature(model) else "no"
    except Exception as error:  # whatever is raised is the finding
        return f"no ({type(error).__name__})"


def both(folder: str) -> dict[str, BaseChatModel]:
    from langchain_huggingface import ChatHuggingFace, HuggingFacePipeline

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    settings = {"max_new_tokens": MOST, "return_full_text": False, "do_sample": False}
    pipe = HuggingFacePipeline(pipeline=pipeline("text-generation", model=model, tokenizer=tokenizer, **settings))
    ours = ChatPrecedent(model=folder, max_tokens=MOST)
    return {"ChatPrecedent": ours, "ChatHuggingFace": ChatHuggingFace(llm=pipe, tokenizer=tokenizer)}


def main() -> None:
    """Print the table."""
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = scripted_tokenizer()
        shape: dict[str, Any] = {"dtype": torch.float32, "max_position_embeddings": 4096}
        tiny_causal_lm(vocab_size=len(tokenizer), **shape).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        models = both(folder)
        print(f"| | {' | '.join(models)} |\n|---|{'---|' * len(models)}")
        for name, feature in FEATURES.items():
            print(f"| {name} | {' | '.join(outcome(feature, model) for model in models.values())} |", flush=True)


if __name__ == "__main__":
    ArgumentParser(description=__doc__).parse_args()
    main()
