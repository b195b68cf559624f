"""Messages to prompt ids, by the model's own chat template or the shipped Hermes one.

The ids depend on the tokenizer, the messages and the tools alone, never on earlier requests.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

import jinja2

from precedent.errors import PromptError, UnsupportedError
from precedent.runtime.plain_values import check_plain
from precedent.text.control_tokens import Markers
from precedent.text.history import CALL_TEXT, Message, fitted
from precedent.text.template_settings import TemplateSettings, variables_of
from precedent.text.tool_formats import ToolFormat, format_of_template, known_formats
from precedent.text.tool_formats.reasoning import reasoning_tags
from precedent.text.tool_formats.response_template import reads_calls
from precedent.text.tool_schema import check_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_BEHIND = {"role": "user", "content": "."}
"""Stands behind an answer, so that the template closes it as it would in a conversation."""

ROLES = ("system", "user", "assistant", "tool")


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    settings: Sequence[TemplateSettings] = (),
) -> list[int]:
    """Prompt ids of `messages` (dicts with `role` and `content`), ready for the assistant's answer.

    Control tokens in messages, tools and `settings` stay text. Raises PromptError on an empty list, an unknown role, a
    bad tool, a text that is no Unicode, or messages that the template refuses; UnsupportedError where the model's tool
    format is not known; what `TemplateSettings` raise.
    """
    _check_messages(messages)
    check_tools(tools or ())
    template = template_for(tokenizer, messages, bool(tools))
    variables = variables_of(settings, tokenizer, template)
    form = format_of_template(template)
    messages = fitted(messages, form)
    refusal: Exception | None = None
    for arranged in _ARRANGEMENTS:
        try:
            return _encode(tokenizer, template, form, arranged(messages), list(tools or ()), variables)
        except jinja2.TemplateError as error:
            refusal = refusal or error
    raise PromptError(f"the model's chat template refuses these messages: {refusal}") from refusal


def told_answer(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    before: Sequence[Message],
    answer: Message,
    tools: Sequence[Mapping[str, Any]] | None = None,
    settings: Sequence[TemplateSettings] = (),
) -> tuple[int, ...] | None:
    """The ids that the chat template adds to the `prompt` of `before` for an answer, its end token included.

    So they have the model's own tool format. None where the template tells no such turn behind its prompt. Raises what
    `render_prompt` raises.
    """
    whole = render_prompt(tokenizer, [*before, answer, _BEHIND], tools, settings)
    told = _first_turn_behind(prompt, whole, tokenizer.eos_token_id)
    if told is None and settings:  # a prompt that forbids thinking ends with an empty thought, which told turns lack
        plain = render_prompt(tokenizer, before, tools)
        told = _first_turn_behind(plain, whole, tokenizer.eos_token_id)
    return told


def _first_turn_behind(prompt: Sequence[int], whole: Sequence[int], end: Any) -> tuple[int, ...] | None:
    """What follows `prompt` in `whole` up to the end token, None where there is no such thing."""
    rest = whole[len(prompt) :]
    told = list(whole[: len(prompt)]) == list(prompt) and end in rest
    return tuple(rest[: rest.index(end) + 1]) if told else None


def template_for(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], has_tools: bool) -> str:
    """The model's own template where it serves (it takes tools, or none occur), else the shipped Hermes template.

    Raises UnsupportedError for a template that writes tool calls in an unknown format, or a tokenizer without ChatML.
    """
    own = _own_template(tokenizer, has_tools)
    needs_tools = has_tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
    if own is not None and (not needs_tools or _takes_tools(own)):
        if has_tools and format_of_template(own) is None and not reads_calls(tokenizer):
            known = ", ".join(form.name for form in known_formats())
            raise UnsupportedError(
                f"the model's chat template writes tool calls in a format that is not known (known: {known}): use "
                "another model, set tokenizer.chat_template to a template in one of them, or register a ToolFormat"
            )
        return own
    if tokenizer.convert_tokens_to_ids("<|im_end|>") in (None, tokenizer.unk_token_id):
        lack = "takes no tools" if own else "is missing"
        raise UnsupportedError(
            f"the model's chat template {lack}, and the shipped Hermes template needs a tokenizer with <|im_start|> "
            "and <|im_end|>: set tokenizer.chat_template, or use a chat model"
        )
    if own is None:
        _warn_of_base_model(str(tokenizer.name_or_path))
    return hermes_template()


@cache
def _warn_of_base_model(name: str) -> None:
    """Once for each model: answers of one that never learned to chat look like a fault of ours."""
    log.warning(
        "%s has no chat template: it is a base model, asked in ChatML that it was not trained on; "
        "take its instruct version, or set tokenizer.chat_template", name or "the model",
    )  # fmt: skip


@lru_cache(maxsize=1)
def hermes_template() -> str:
    """The shipped template: ChatML, tools in the system turn, calls and results as Hermes writes them."""
    return files("precedent.text").joinpath("templates/hermes.jinja").read_text(encoding="utf-8").rstrip("\n")


def _own_template(tokenizer: PreTrainedTokenizerBase, has_tools: bool) -> str | None:
    own: Any = tokenizer.chat_template
    if isinstance(own, Mapping):  # several named templates
        own = (own.get("tool_use") if has_tools else None) or own.get("default")
    return None if own is None else str(own)


def _takes_tools(template: str) -> bool:
    return re.search(r"\btools\b", template) is not None


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise PromptError("the message list is empty: give at least one message")
    for position, message in enumerate(messages, start=1):
        if message.get("role") not in ROLES:
            raise PromptError(f"message {position} has role {message.get('role')!r}: use one of {', '.join(ROLES)}")
        check_plain(f"message {position}", message, PromptError)


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    form: ToolFormat | None,
    messages: list[Message],
    tools: list[Any],
    variables: dict[str, Any],
) -> list[int]:
    markers = Markers.for_input(tokenizer, template, [messages, tools, variables], _tags(tokenizer, template, form))
    if markers is not None:
        messages = [_marked(message, markers, form) for message in messages]
        tools = markers.mark(tools)
        variables = {name: markers.mark(value) for name, value in variables.items()}
    messages = [_with_call_text(message, form) for message in messages]
    rendered = _rendered(tokenizer, template, messages, tools, variables)
    if markers is not None:
        return markers.encode(tokenizer, rendered)
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    template: str,
    messages: list[Message],
    tools: list[Any],
    variables: dict[str, Any],
) -> str:
    """Raises PromptError where the template fails on a caller's value: templates compare, join and look into them."""
    settings: dict[str, Any] = {"chat_template": template, "tokenize": False, "add_generation_prompt": True}
    try:
        return str(tokenizer.apply_chat_template(messages, tools=tools or None, **settings, **variables))
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
        given = f" with chat_template_kwargs={variables!r}" if variables else ""
        raise PromptError(f"the model's chat template fails on these messages{given}: {error}") from error


def _tags(tokenizer: PreTrainedTokenizerBase, template: str, form: ToolFormat | None) -> list[str]:
    """Texts that the template may look for in messages."""
    reasoning = reasoning_tags(tokenizer, template)
    return [*(form.tags if form else ()), *((reasoning.open, reasoning.close) if reasoning else ())]


def _marked(message: Message, markers: Markers, form: ToolFormat | None) -> Message:
    """The message with its control tokens enclosed, but for the tags of a broken call, which the model wrote itself."""
    marked: Message = markers.mark(message)
    if form is not None and CALL_TEXT in message:
        marked[CALL_TEXT] = markers.mark(message[CALL_TEXT], spared=form.tags)
    return marked


def _with_call_text(message: Message, form: ToolFormat | None) -> Message:
    """A broken call as text, where the model wrote it."""
    if CALL_TEXT not in message:
        return message
    content = message["content"]
    separator = form.separator if form and content else ""
    kept = {key: value for key, value in message.items() if key != CALL_TEXT}
    return {**kept, "content": f"{content}{separator}{message[CALL_TEXT]}"}


def _as_given(messages: Sequence[Message]) -> list[Message]:
    return list(messages)


def _merged(messages: Sequence[Message]) -> list[Message]:
    """System messages as one at the front, neighbours of one role as one: for templates whose turns alternate."""
    system = [message for message in messages if message["role"] == "system"]
    others = [message for message in messages if message["role"] != "system"]
    merged: list[Message] = []
    for message in [*system, *others]:
        plain = message["role"] != "tool" and not message.get("tool_calls")
        if merged and plain and merged[-1]["role"] == message["role"] and not merged[-1].get("tool_calls"):
            merged[-1] = {**merged[-1], "content": f"{merged[-1]['content']}\n\n{message['content']}"}
        else:
            merged.append(message)
    return merged


def _without_system(messages: Sequence[Message]) -> list[Message]:
    """The system text at the head of the first user message, for templates that know no system role."""
    merged = _merged(messages)
    if merged[0]["role"] != "system":
        return merged
    return _merged([{**merged[0], "role": "user"}, *merged[1:]])


_ARRANGEMENTS: tuple[Callable[[Sequence[Message]], list[Message]], ...] = (_as_given, _merged, _without_system)
