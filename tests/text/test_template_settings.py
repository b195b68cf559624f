"""What a caller may tell a chat template: its own variables and whether to think, never the conversation."""

from __future__ import annotations

from typing import Any

import pytest

from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.text.answers import answer_syntax
from precedent.text.prompt import hermes_template, render_prompt
from precedent.text.template_settings import TemplateSettings, template_variables
from precedent_testing.scripted_engine import chatml_tokenizer

MESSAGES = "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}"
QWEN = f"""{MESSAGES}{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}
{{%- if enable_thinking is defined and enable_thinking is false %}}
{{{{- '<think>\\n\\n</think>\\n\\n' }}}}{{%- endif %}}
{{%- endif %}}"""
DEEPSEEK = f"""{{%- if not thinking is defined %}}{{%- set thinking = false %}}{{%- endif %}}{MESSAGES}
{{{{- '<think>' if thinking else '</think>' }}}}"""
GPT_OSS = f"{{{{- 'Reasoning: ' + (reasoning_effort or 'medium') + '\\n' }}}}{MESSAGES}"
LLAMA = f"""{{%- if not date_string is defined %}}{{%- set date_string = '26 Jul 2024' %}}{{%- endif %}}
{{{{- 'Today: ' + date_string + '\\n' }}}}{MESSAGES}"""
SET_ALWAYS = f"{{%- if messages %}}{{%- set turns = messages %}}{{%- endif %}}{{{{ turns | length }}}}{MESSAGES}"


def prompt(template: str, *settings: TemplateSettings, text: str = "hi") -> str:
    tokenizer = chatml_tokenizer(chat_template=template)
    return str(tokenizer.decode(render_prompt(tokenizer, [{"role": "user", "content": text}], None, settings)))


@pytest.mark.parametrize(
    ("template", "told", "written"),
    [
        (QWEN, TemplateSettings({"enable_thinking": False}), "<think>\n\n</think>"),
        (QWEN, TemplateSettings(reasoning=False), "<think>\n\n</think>"),
        (DEEPSEEK, TemplateSettings(reasoning=True), "<think>"),
        (DEEPSEEK, TemplateSettings(reasoning=False), "</think>"),
        (GPT_OSS, TemplateSettings(reasoning="high"), "Reasoning: high"),
        (LLAMA, TemplateSettings({"date_string": "1 Jan 1970"}), "Today: 1 Jan 1970"),
    ],
)
def test_a_template_is_told(template: str, told: TemplateSettings, written: str) -> None:
    assert written in prompt(template, told)
    assert prompt(template, told) == prompt(template, TemplateSettings({}, None), told)


def test_what_is_said_later_goes_before() -> None:
    model, call = TemplateSettings({"enable_thinking": False}), TemplateSettings(reasoning=True)
    assert prompt(QWEN, model, call) == prompt(QWEN)
    assert prompt(QWEN, call, model) == prompt(QWEN, model)


def test_thoughts_that_a_prompt_has_closed_are_not_open() -> None:
    """The answer's reader goes by the prompt, so that an answer after `</think>` is text."""
    tokenizer = chatml_tokenizer(chat_template=DEEPSEEK)
    for thinking in (True, False):
        turns = [{"role": "user", "content": "hi"}]
        ids = render_prompt(tokenizer, turns, None, [TemplateSettings(reasoning=thinking)])
        assert answer_syntax(tokenizer, turns, [], ids).opened_by_prompt is thinking


@pytest.mark.parametrize(
    ("template", "variables", "said"),
    [
        (QWEN, {"enable_thinkng": False}, "does not read 'enable_thinkng'; it reads enable_thinking"),
        (QWEN, {"date_string": "x"}, "does not read 'date_string'; it reads enable_thinking"),
        (SET_ALWAYS, {"turns": []}, "does not read 'turns'; it reads no variable"),
        *[
            (QWEN, {name: "x"}, f"cannot replace '{name}', which comes from the conversation")
            for name in ("messages", "tools", "chat_template", "tokenize", "add_generation_prompt", "eos_token")
        ],
        (QWEN, {"raise_exception": 1}, "cannot replace 'raise_exception'"),
        (QWEN, {1: 2}, "must map names of the template to values"),
        (QWEN, {"enable_thinking": "\ud800"}, "half of a surrogate pair"),
    ],
    ids=str,
)
def test_what_a_template_cannot_be_told_is_refused(template: str, variables: dict[Any, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        prompt(template, TemplateSettings(variables))


@pytest.mark.parametrize(
    ("template", "reasoning", "said"),
    [
        (LLAMA, False, "no switch for thinking"),
        (LLAMA, "low", "no switch for thinking"),
        (GPT_OSS, True, "write reasoning='low' or 'high'"),
        (QWEN, "low", "write reasoning=True or False"),
    ],
)
def test_a_template_without_the_switch_is_refused_by_name(template: str, reasoning: Any, said: str) -> None:
    with pytest.raises(UnsupportedError, match=said):
        prompt(template, TemplateSettings(reasoning=reasoning))


def test_one_switch_is_not_set_twice() -> None:
    with pytest.raises(ConfigError, match="reasoning= and chat_template_kwargs both set 'enable_thinking'"):
        prompt(QWEN, TemplateSettings({"enable_thinking": True}, reasoning=False))
    with pytest.raises(ConfigError, match="reasoning=3 must be True, False"):
        TemplateSettings(reasoning=3)  # type: ignore[arg-type]


def test_control_tokens_in_a_variable_stay_text() -> None:
    tokenizer = chatml_tokenizer(chat_template=LLAMA)
    turns, told = [{"role": "user", "content": "hi"}], TemplateSettings({"date_string": "x<|im_end|>"})
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    assert render_prompt(tokenizer, turns, None, [told]).count(end) == render_prompt(tokenizer, turns).count(end)


def test_a_template_that_fails_on_a_value_says_so() -> None:
    with pytest.raises(
        PromptError, match="the model's chat template fails on these messages with chat_template_kwargs="
    ):
        prompt(GPT_OSS, TemplateSettings({"reasoning_effort": 3}))
    with pytest.raises(PromptError, match="the model's chat template cannot be read"):
        prompt("{% if", TemplateSettings({"x": 3}))


def test_variables_are_read_through_branches_macros_and_generation_tags() -> None:
    macro = "{% macro f(a) %}{{ a ~ given }}{% endmacro %}"
    template = macro + "{% generation %}{{ f(1) }}{% endgeneration %}{% for x in y %}{% break %}{% endfor %}"
    assert template_variables(template) == {"given", "y"}
    assert template_variables(hermes_template()) <= {"messages", "tools", "add_generation_prompt"}
