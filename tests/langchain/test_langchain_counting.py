"""Tokens of any part of a conversation are counted under every chat template, so that histories can be trimmed."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.format_models import MODELS, TOKENIZERS
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.messages.tool import tool_call

from precedent.errors import PromptError
from precedent.langchain import ChatPrecedent
from precedent.text.prompt import hermes_template
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

ALTERNATING = (  # after Mistral's and Gemma's
    "{% for m in messages if m.role != 'system' %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{# tools #}"
)
WITH_A_QUESTION = (  # after Qwen 3.5's
    "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
    "{{ raise_exception('No user query found in messages.') }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{# tools #}"
)
FROM_THE_FIRST = (  # fails with an error of Python's
    "{{ '<|im_start|>user\n' + messages[0].content + '<|im_end|>\n' if messages[0].role == 'user' else 1 / 0 }}"
    "{% for m in messages[1:] %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{# tools #}"
)
OWN = {"alternating": ALTERNATING, "with a question": WITH_A_QUESTION, "from the first": FROM_THE_FIRST}
TOKENIZERS_OF_ALL = {
    **TOKENIZERS,
    "hermes template": chatml_tokenizer(chat_template=hermes_template()),
    **{name: chatml_tokenizer(chat_template=template) for name, template in OWN.items()},
}
WORDS = "The order was sent on Monday and should arrive soon. " * 6
TALK = [
    SystemMessage("Be brief."),
    HumanMessage(f"Where is order 7? {WORDS}"),
    AIMessage(f"I look. {WORDS}", tool_calls=[tool_call(name="look_up", args={"number": "7"}, id="abcdefghi")]),
    ToolMessage(f"order 7 is open {WORDS}", tool_call_id="abcdefghi", name="look_up"),
    AIMessage(f"It is open. {WORDS}"),
    HumanMessage(f"And order 8? {WORDS}"),
    AIMessage(f"I do not know. {WORDS}"),
]


def scripted(name: str, **settings: Any) -> ChatPrecedent:
    engine: Any = ScriptedEngine(TOKENIZERS_OF_ALL[name], lambda prompt: "fine", **settings)
    return ChatPrecedent.from_engine(engine)


ALL = pytest.mark.parametrize("name", TOKENIZERS_OF_ALL)


def test_there_is_a_template_of_every_format() -> None:
    assert set(MODELS) <= set(TOKENIZERS_OF_ALL)


@ALL
def test_every_part_of_a_conversation_has_a_count(name: str) -> None:
    model = scripted(name)
    for start in range(len(TALK)):
        for end in range(start + 1, len(TALK) + 1):
            part = TALK[start:end]
            # some templates leave out system messages, or text beside calls
            said = [one for one in part if one.type != "system" and not getattr(one, "tool_calls", ())]
            texts = sum(len(model.get_token_ids(str(message.content))) for message in said)
            whole = sum(len(model.get_token_ids(str(message.content))) for message in part)
            assert texts < model.get_num_tokens_from_messages(part) < whole + 250 * len(part), (start, end)
    assert model.get_num_tokens_from_messages([]) == 0


@pytest.mark.parametrize("name", OWN)
def test_a_part_that_the_template_refuses_counts_as_under_a_template_that_takes_it(name: str) -> None:
    lenient = chatml_tokenizer(
        chat_template="{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    engine: Any = ScriptedEngine(lenient, ["x"])
    exact, model = ChatPrecedent.from_engine(engine), scripted(name)
    for part in (TALK[4:5], [TALK[4], TALK[4], TALK[6]], TALK[6:]):
        expected = exact.get_num_tokens_from_messages(part)
        assert abs(model.get_num_tokens_from_messages(part) - expected) <= 10 * len(part)  # names of roles differ


@pytest.mark.parametrize("name", OWN)
def test_an_answer_is_still_refused_where_the_template_refuses_it(name: str) -> None:
    with pytest.raises(PromptError, match="chat template"):
        scripted(name).invoke([TALK[4]])


@ALL
@pytest.mark.parametrize("strategy", ["first", "last"])
def test_histories_are_trimmed(name: str, strategy: str) -> None:
    model = scripted(name)
    whole = model.get_num_tokens_from_messages(TALK)
    for share in (0.0, 0.3, 0.6, 1.5):
        kept = trim_messages(
            TALK, max_tokens=int(share * whole), token_counter=model, strategy=strategy, allow_partial=False
        )
        assert model.get_num_tokens_from_messages(kept) <= share * whole
        assert (len(kept) == len(TALK)) is (share > 1)


@ALL
def test_an_agent_summarises_by_the_models_own_count(name: str) -> None:
    model = scripted(name)
    middleware = SummarizationMiddleware(
        model=model,
        trigger=("fraction", 0.01),
        keep=("fraction", 0.005),
        token_counter=model.get_num_tokens_from_messages,
    )
    agent = create_agent(model, [], middleware=[middleware])
    state = agent.invoke({"messages": [*TALK[1:], HumanMessage("Thanks.")]})
    assert "summary" in str(state["messages"][0].content)
    assert state["messages"][-1].text == "fine"


def test_an_image_counts_as_its_placeholder() -> None:
    model = scripted("hermes template")
    image = HumanMessage([{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}])
    assert model.get_num_tokens_from_messages([image]) > model.get_num_tokens_from_messages([HumanMessage("see")])
