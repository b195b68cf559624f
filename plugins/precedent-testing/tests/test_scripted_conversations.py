"""Conversations as scripts: an agent that follows one gets its answers, any other is told where it left."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.scripted_models import NOT_CHATML, TOKENIZER, look_up, model
from langchain.agents import create_agent

from precedent.errors import ConfigError, GenerationError
from precedent.langchain import ChatPrecedent
from precedent_testing.pytest_plugin import EngineMaker
from precedent_testing.scripted_engine import ScriptedEngine, conversations

CALLED = '<tool_call>\n{"name":"look_up", "arguments":{"number":"7"}}\n</tool_call>'
SCRIPT = [
    ("system", "Be kind."),
    ("user", "Where is order 7?"),
    ("assistant", CALLED),
    ("tool", "order 7 is open"),
    ("assistant", "It is open."),
]


def agent_on(engine: Any, prompt: str = "Be kind.") -> Any:
    return create_agent(ChatPrecedent.from_engine(engine), [look_up], system_prompt=prompt)


QUESTION: Any = {"messages": [("user", "Where is order 7?")]}


def test_a_conversation_is_a_script(precedent_engine: EngineMaker) -> None:
    """Each answer belongs to its prompt, so it may be asked for as often as one likes."""
    agent = agent_on(precedent_engine(SCRIPT))
    for _ in range(2):
        assert agent.invoke(QUESTION)["messages"][-1].content == "It is open."


@pytest.mark.parametrize(
    ("place", "line", "said"),
    [
        (0, ("system", "Be rude."), "lacks the system message"),
        (1, ("user", "Where is order 8?"), "lacks the user message.*order 8"),
        (2, ("assistant", CALLED.replace("7", "8")), "lacks the tool message.*order 7"),
        (3, ("tool", "order 7 is sent"), "lacks the tool message.*is sent"),
        (3, ("user", "order 7 is open"), "It is open"),
    ],
)
def test_an_agent_that_does_not_follow_it_is_told_where(place: int, line: tuple[str, str], said: str) -> None:
    script = [*SCRIPT[:place], line, *SCRIPT[place + 1 :]]
    agent = agent_on(ScriptedEngine(TOKENIZER, script))
    if said == "It is open":  # templates put results into users' turns
        assert agent.invoke(QUESTION)["messages"][-1].content == "It is open."
        return
    with pytest.raises(GenerationError, match=said):
        agent.invoke(QUESTION)


def test_a_conversation_that_is_over_has_no_more_answers() -> None:
    llm = model([("user", "hi"), ("assistant", "Good day.")])
    assert llm.invoke("hi").content == "Good day."
    with pytest.raises(GenerationError, match="it has 1 answers, and the prompt holds 1"):
        llm.invoke([("user", "hi"), ("ai", "Good day."), ("user", "And?")])
    with pytest.raises(GenerationError, match="no message says 'And\\?', which the prompt has as user"):
        llm.invoke([("user", "hi"), ("user", "And?")])


def test_several_conversations_are_one_script() -> None:
    llm = model(conversations([("user", "a"), ("assistant", "A")], [("user", "b"), ("assistant", "B")]))
    assert [llm.invoke(text).content for text in ("b", "a", "b")] == ["B", "A", "B"]
    with pytest.raises(GenerationError, match=r"follows no conversation of the script: .*'a'; .*'b'"):
        llm.invoke("c")


def test_what_is_no_conversation_is_refused() -> None:
    for line in (("narrator", "x"), ("user",), 3):
        with pytest.raises(ConfigError, match="is not a line of a conversation"):
            model([line])
    with pytest.raises(GenerationError, match="not ChatML; give a function"):
        model([("user", "hi"), ("assistant", "x")], tokenizer=NOT_CHATML).invoke("hi")
