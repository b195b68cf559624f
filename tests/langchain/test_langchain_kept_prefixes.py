"""`keep_prefixes` of a chat model: system turns and tools outlive the process, for the tenant that they are of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.tools import tool

from precedent.langchain import ChatPrecedent
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

SYSTEM = SystemMessage("You look after orders. " * 5)


@tool
def look_up(number: str) -> str:
    """Look an order up."""
    return number


@contextmanager
def started(folder: Path, **settings: Any) -> Iterator[ChatPrecedent]:
    """A chat model as a new process has it."""
    settings = {"speculation_cache": folder, "keep_prefixes": True, "embedder": HashEmbedder(), **settings}
    chat = ChatPrecedent.from_model(tiny_causal_lm(seed=21), byte_tokenizer(), max_tokens=3, **settings)
    yield chat
    chat.engine.close()


def reused(chat: Any, question: str, **told: Any) -> int:
    """How many tokens of the prompt were not computed."""
    answer = chat.invoke([SYSTEM, HumanMessage(question)], **told)
    return answer.usage_metadata["input_token_details"]["cache_read"]


def test_after_a_restart_another_question_finds_system_turn_and_tools(tmp_path: Path) -> None:
    with started(tmp_path) as chat:
        assert reused(chat.bind_tools([look_up]), "where is order 17") == 0
    with started(tmp_path) as chat:
        assert reused(chat, "where is order 17") == 0, "without the tools it is another beginning"
        with_tools = reused(chat.bind_tools([look_up]), "is 18 late?")
        assert with_tools > len(SYSTEM.content) + len(look_up.description)
        assert reused(chat.bind_tools([look_up]), "is 18 late?", tenant="other") == 0


def test_a_run_that_is_nobodys_keeps_nothing(tmp_path: Path) -> None:
    with started(tmp_path, tenant_from="metadata") as chat:
        reused(chat, "where is order 17")
        assert list(tmp_path.rglob("*.safetensors")) == []
        reused(chat.with_config(metadata={"tenant": "shop"}), "where is order 17")
    assert len(list(tmp_path.rglob("*.safetensors"))) == 1
