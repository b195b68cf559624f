"""What the chat template is told counts in prompts, token counts and keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from helpers.scripted_kinds import asked, scripted
from langchain_core.messages import HumanMessage

from precedent.cache import Completion, prompt_fingerprint
from precedent.errors import ConfigError
from precedent_testing.scripted_engine import chatml_tokenizer

QWEN = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


def thinking(**fields: Any) -> Any:
    return scripted(tokenizer=chatml_tokenizer(chat_template=QWEN), **fields)


@pytest.mark.parametrize("told", [{"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning": False}], ids=str)
def test_what_a_template_is_told_counts_in_prompts_token_counts_and_keys(told: dict[str, Any]) -> None:
    model, plain = thinking(**told), thinking()
    model.invoke("hi")
    plain.invoke("hi", **told)
    assert asked(model).prompt == asked(plain).prompt
    assert asked(model).prompt.endswith("<think></think>")
    assert model.get_num_tokens_from_messages([HumanMessage("hi")]) == len(asked(model).prompt_ids)
    assert model._get_llm_string() != plain._get_llm_string() != plain._get_llm_string(**told)
    assert model._identifying_params != plain._identifying_params


def test_a_call_says_it_louder_than_the_model() -> None:
    model = thinking(reasoning=False)
    model.invoke("hi", reasoning=True)
    assert asked(model).prompt.endswith("assistant\n")
    thinking(chat_template_kwargs={"enable_thinking": True}).invoke("hi", reasoning=False)


def test_answers_that_were_given_before_are_told_behind_the_same_prompt() -> None:
    model, stored = thinking(reasoning=False), list[Completion]()
    model.engine.tokenizer_fingerprint = "any"
    model.engine.cache = SimpleNamespace(insert=lambda completion: stored.append(completion) or 1)
    model.invoke("hi")
    assert model.warm([[("user", "hi"), ("ai", "one")]]) == 1
    assert [one.prompt_fingerprint for one in stored] == [prompt_fingerprint(asked(model).prompt_ids)]
    assert stored[0].text == "one"


@pytest.mark.parametrize("wrong", [{"messages": []}, {"tools": []}, {"enable_thinkng": True}, 3, {1: 2}], ids=str)
def test_a_template_is_not_told_what_it_cannot_be(wrong: Any) -> None:
    with pytest.raises(ConfigError):
        thinking().invoke("hi", chat_template_kwargs=wrong)
