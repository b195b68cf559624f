"""A real tiny model that gives the answers that LangChain's standard tests look for."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from precedent.cache import Completion, SpeculationCache
from precedent.engine.engine import Engine
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine, scripted_tokenizer

CALLS = {
    "magic_function": '{"input": 3}',
    "magic_function_no_args": "{}",
    "get_weather": '{"location": "San Francisco"}',
    "greeting_generator": '{"answer_style": "pirate"}',
    "my_adder_tool": '{"a": 3, "b": 4}',
    **dict.fromkeys(["Joke", "JokeDict"], '{"setup": "Why did the cat sit down?", "punchline": "It was tired."}'),
}

TEXT = "one, two, three, and so on: a bun goes above and below a hamburger."
THOUGHT = "<think>Is it a bun?</think>"
THINK = "Think before you answer."


def answer(prompt: str) -> str:
    """Calls the tool that a question needs unless its result is there, else says something."""
    question = prompt.rsplit("<|im_start|>user\n", 1)[-1]
    if "<tool_response>" in question:
        return TEXT
    if "Create a customer named" in question:
        name = question.split("'")[1]
        return call("unicode_customer", f'{{"customer_name": "{name}", "description": "new"}}')
    for name, arguments in CALLS.items():
        if f'"name": "{name}"' in prompt:
            return call(name, arguments)
    if "joke" in question:
        return CALLS["Joke"]
    return f"{THOUGHT}{TEXT}" if THINK in question else TEXT


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def thinking_tokenizer() -> Any:
    """The scripted model's tokenizer, its template one of a model that may think first."""
    tokenizer = copy.deepcopy(scripted_tokenizer())
    tokenizer.chat_template += "{# <think> </think> #}"
    return tokenizer


@cache
def engine_of(name: str, draft_model: bool, cached: str) -> Engine:
    """An engine for all tests of a kind; with a warm cache it knows every answer, a cold one learns them."""
    store = SpeculationCache.open(embedder=HashEmbedder()) if cached else None
    tokenizer = thinking_tokenizer()
    engine = scripted_model_engine(answer, tokenizer=tokenizer, name=name, draft_model=draft_model, cache=store)
    known = (TEXT, CALLS["Joke"], *(call(*pair) for pair in CALLS.items()))
    for text in known if cached == "warm" and store else ():
        ids = (*engine.tokenizer.encode(text, add_special_tokens=False), engine.tokenizer.eos_token_id)
        store.insert(Completion(token_ids=ids, tokenizer=engine.tokenizer_fingerprint, model="", query=text))
    return engine
