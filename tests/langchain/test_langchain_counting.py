"""Tokens of any part of a conversation are counted under every chat template, so that histories can be trimmed."""

from __future__ import annotations

from typing import Any

import pytest
from helpers.format_models import MODELS, TOKENIZERS
from helpers.scripted_models import HALF, asked, look_up
from helpers.scripted_models import MODELS as KINDS
from helpers.scripted_models import scripted as scripted_kind
from langchain.agents import create_agent
from langchain.agents.middleware import SummarizationMiddleware
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage, trim_messages
from langchain_core.messages.tool import tool_call

from precedent.errors import PromptError
from precedent.langchain import ChatPrecedent
from precedent.text.prompt import hermes_template
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

TURNS = (
    "{% for m in messages[FROM:] %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}{# tools #}"
)
OWN = {
    "alternating": (  # after Mistral's and Gemma's
        "{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    + TURNS.replace("FROM", "1 if messages[0].role == 'system' else 0"),
    "with a question": (  # after Qwen 3.5's
        "{% if not messages | selectattr('role', 'equalto', 'user') | list %}"
        "{{ raise_exception('No user query found in messages.') }}{% endif %}"
    )
    + TURNS.replace("FROM", ""),
    "from the first": "{{ 1 / 0 if messages[0].role != 'user' else '' }}" + TURNS.replace("FROM", ""),
}
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


@ALL
def test_every_part_of_a_conversation_has_a_count(name: str) -> None:
    assert set(MODELS) <= set(TOKENIZERS_OF_ALL), "there is a template of every format"
    model = scripted(name)
    for start in range(len(TALK)):
        for end in range(start + 1, len(TALK) + 1):
            part = TALK[start:end]
            # some templates leave out system messages, or text beside calls
            said = [one for one in part if one.type != "system" and not getattr(one, "tool_calls", ())]
            texts, whole = (
                sum(len(model.get_token_ids(str(message.content))) for message in some) for some in (said, part)
            )
            assert texts < model.get_num_tokens_from_messages(part) < whole + 250 * len(part), (start, end)
    assert model.get_num_tokens_from_messages([]) == 0
    if name in OWN:
        with pytest.raises(PromptError, match="chat template"):
            model.invoke([TALK[4]])


@ALL
@pytest.mark.sampled(4)
def test_histories_are_trimmed_and_summarised_by_the_models_own_count(name: str) -> None:
    model = scripted(name)
    count = model.get_num_tokens_from_messages
    whole = count(TALK)
    for strategy in ("first", "last"):
        for share in (0.0, 0.3, 0.6, 1.5):
            most = int(share * whole)
            kept = trim_messages(TALK, max_tokens=most, token_counter=model, strategy=strategy, allow_partial=False)
            assert count(kept) <= share * whole
            assert (len(kept) == len(TALK)) is (share > 1)
    shares = {"trigger": ("fraction", 0.01), "keep": ("fraction", 0.005)}
    agent = create_agent(model, [], middleware=[SummarizationMiddleware(model=model, token_counter=count, **shares)])
    state = agent.invoke({"messages": [*TALK[1:], HumanMessage("Thanks.")]})
    assert "summary" in str(state["messages"][0].content)
    assert state["messages"][-1].text == "fine"


def test_messages_are_counted_in_every_form_in_which_they_are_answered() -> None:
    model: Any = scripted("hermes template")
    model.invoke("hi")
    count = model.get_num_tokens_from_messages
    for given in ("hi", ["hi"], [HumanMessage("hi")], [("user", "hi")], [{"role": "user", "content": "hi"}]):
        assert count(given) == len(asked(model).prompt_ids)
    assert count("hi", tools=[look_up]) > count("hi")
    image = HumanMessage([{"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "x"}}])
    assert count([image]) > count("hi"), "an image is its placeholder"
    for given in ([3], 3, None, [("nobody", "hi")], [HumanMessage(HALF)]):
        with pytest.raises(PromptError):
            count(given)


@KINDS
def test_tokens_of_texts_are_counted_by_the_models_own_tokenizer(kind: Any) -> None:
    model = scripted_kind(kind)
    assert model.get_num_tokens("ab<|im_end|>") == len(model.engine.tokenizer.encode("ab<|im_end|>"))
    for given, said in ((3, "expected a text.*, got 3"), (None, "got None"), (HALF, r"the text holds '\\ud800'")):
        with pytest.raises(PromptError, match=said):
            model.get_token_ids(given)
    assert scripted_kind(kind, custom_get_token_ids=lambda text: [7] * 3).get_num_tokens("hi") == 3
