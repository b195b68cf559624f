"""Messages to prompt ids, with the model's own chat template or the shipped Hermes template.

The ids depend only on the tokenizer, the messages, the tools and the template settings, never on earlier requests.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.resources import files
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import jinja2

from precedent.errors import PromptError, UnsupportedError
from precedent.runtime.plain_values import check_plain
from precedent.text.codec import check_length
from precedent.text.control_tokens import Markers
from precedent.text.end_tokens import end_tokens
from precedent.text.history import CALL_TEXT, Message, fitted
from precedent.text.template_settings import TemplateSettings, variables_of
from precedent.text.tool_formats import ToolFormat, format_of_template, known_formats
from precedent.text.tool_formats.formats import reasoning_tags
from precedent.text.tool_formats.response_template import reads_calls
from precedent.text.tool_schema import check_tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

_NEXT_TURN = {"role": "user", "content": "."}
"""A turn to place after an answer, so that the template closes the answer as it would in a conversation."""

_SHORT_ANSWER = {"role": "assistant", "content": "."}

ROLES = ("system", "user", "assistant", "tool")

WITHOUT_TEMPLATE = (
    "%s has no chat template: it is a base model, asked in ChatML that it was not trained on; take its instruct "
    "version, or give chat_template="
)
WITHOUT_TOOLS = (
    "the chat template of %s takes no tools: conversations with tools are written in ChatML, with calls in the Hermes "
    "format; if the model was not trained on it, give chat_template="
)

CHATML = "<|im_end|>"
"""The token that tells a tokenizer which knows ChatML."""


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    settings: Sequence[TemplateSettings] = (),
    context_length: int | None = None,
    *,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Render `messages` (dicts with `role` and `content`) to prompt ids, ready for the assistant's answer.

    Without `add_generation_prompt` they end with the last message.
    A conversation without a system message gets the tokenizer's `default_system_message`, which a model may come with.
    Control tokens in messages, tools and `settings` stay text. Raises PromptError for an empty list, an unknown role,
    a bad tool, text that is not valid Unicode, or messages that the template refuses; ContextOverflowError for far more
    tokens than `context_length`; UnsupportedError if the model's tool format is unknown; and whatever
    `TemplateSettings.of_template` raises.
    """
    _check_messages(messages)
    check_tools(tools or ())
    system = getattr(tokenizer, "default_system_message", None)
    if system and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": system}, *messages]
    template = template_for(tokenizer, messages, bool(tools))
    variables = variables_of(settings, tokenizer, template)
    form = format_of_template(template)
    messages = fitted(messages, form)
    rendering = _Rendering(tokenizer, template, form, list(tools or ()), variables, add_generation_prompt)
    rendered, markers = rendering.of(messages)
    if context_length is not None:
        check_length(tokenizer, rendered, context_length)
    if markers is not None:
        return markers.encode(tokenizer, rendered)
    return list(tokenizer.encode(rendered, add_special_tokens=False))


def num_prompt_tokens(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    settings: Sequence[TemplateSettings] = (),
) -> int:
    """The length of the prompt of `messages`, which may be any part of a conversation; no messages are 0 tokens.

    For a part that the template refuses, or that has no user turn, it is the tokens of the texts and what the template
    adds to turns. Raises what `render_prompt` raises for a whole conversation.
    """
    if not messages:
        return 0
    _check_messages(messages)
    check_tools(tools or ())
    if any(message["role"] == "user" for message in messages):
        with suppress(PromptError):  # the template's own refusal
            return len(render_prompt(tokenizer, messages, tools, settings))
    text = len(tokenizer.encode(_NEXT_TURN["content"], add_special_tokens=False))
    one = len(render_prompt(tokenizer, [_NEXT_TURN], tools, settings)) - text
    three = len(render_prompt(tokenizer, [_NEXT_TURN, _SHORT_ANSWER, _NEXT_TURN], tools, settings)) - 3 * text
    said = "".join(map(_spoken, messages))
    return one + (three - one) * (len(messages) - 1) // 2 + len(tokenizer.encode(said, add_special_tokens=False))


def _spoken(message: Message) -> str:
    broken = [call["args"] for call in message.get("invalid_calls") or ()]
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls") or ()]
    return "".join([message.get("reasoning_content") or "", message["content"], *calls, *broken])


def told_answer(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[int],
    before: Sequence[Message],
    answer: Message,
    tools: Sequence[Mapping[str, Any]] | None = None,
    settings: Sequence[TemplateSettings] = (),
) -> tuple[int, ...] | None:
    """The ids that the chat template appends to `prompt` (rendered from `before`) for an answer, end token included.

    Tool calls are therefore in the model's own format. None if the rendered conversation does not continue the prompt
    with such a turn. Raises what `render_prompt` raises.
    """
    whole = render_prompt(tokenizer, [*before, answer, _NEXT_TURN], tools, settings)
    ends = frozenset(one.token_id for one in end_tokens(tokenizer))
    ids = _first_turn_after(prompt, whole, ends)
    if ids is None and settings:  # a prompt that forbids thinking ends with an empty thought, which past turns lack
        plain = render_prompt(tokenizer, before, tools)
        ids = _first_turn_after(plain, whole, ends)
    return ids


def _first_turn_after(prompt: Sequence[int], whole: Sequence[int], ends: Collection[int]) -> tuple[int, ...] | None:
    """The part of `whole` that follows `prompt`, up to the first end token; None if there is none."""
    rest = whole[len(prompt) :]
    place = next((place for place, token in enumerate(rest) if token in ends), None)
    if place is None or list(whole[: len(prompt)]) != list(prompt):
        return None
    return tuple(rest[: place + 1])


def template_for(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], has_tools: bool) -> str:
    """The model's own template if it suffices (it takes tools, or there are none), else the shipped Hermes template.

    Raises UnsupportedError for a template that writes tool calls in an unknown format, or a tokenizer without ChatML.
    """
    own = _own_template(tokenizer, has_tools)
    needs_tools = has_tools or any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
    if own is not None and (not needs_tools or re.search(r"\btools\b", own)):
        if has_tools and format_of_template(own) is None and not reads_calls(tokenizer):
            known = ", ".join(form.name for form in known_formats())
            raise UnsupportedError(
                f"the model's chat template writes tool calls in a format that is not known (known: {known}): use "
                "another model, give chat_template= a template in one of them, or register a ToolFormat"
            )
        return own
    if not knows_chatml(tokenizer):
        lack = "takes no tools" if own else "is missing"
        raise UnsupportedError(
            f"the model's chat template {lack}, and the shipped Hermes template needs a tokenizer with <|im_start|> "
            "and <|im_end|>: give chat_template= a text, a file or a family's name, or use a chat model"
        )
    _warn_once(str(tokenizer.name_or_path), WITHOUT_TEMPLATE if own is None else WITHOUT_TOOLS)
    return hermes_template()


def knows_chatml(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer has the tokens of ChatML, in which the shipped template is written."""
    return tokenizer.convert_tokens_to_ids(CHATML) not in (None, tokenizer.unk_token_id)


@cache
def _warn_once(name: str, lack: str) -> None:
    """Say once for each model why its answers may look like a bug of ours."""
    log.warning(lack, name or "the model")


@lru_cache(maxsize=1)
def hermes_template() -> str:
    """The shipped template: ChatML, tools in the system turn, calls and results in the Hermes format."""
    return files("precedent.text").joinpath("templates/hermes.jinja").read_text(encoding="utf-8").rstrip("\n")


def _own_template(tokenizer: PreTrainedTokenizerBase, has_tools: bool) -> str | None:
    own: Any = tokenizer.chat_template
    if isinstance(own, Mapping):  # several named templates
        own = (own.get("tool_use") if has_tools else None) or own.get("default")
    return None if own is None else str(own)


def _check_messages(messages: Sequence[Message]) -> None:
    if not messages:
        raise PromptError("the message list is empty: give at least one message")
    for position, message in enumerate(messages, start=1):
        if message.get("role") not in ROLES:
            raise PromptError(f"message {position} has role {message.get('role')!r}: use one of {', '.join(ROLES)}")
        check_plain(f"message {position}", message, PromptError)


@dataclass(frozen=True, slots=True)
class _Rendering:
    """A chat template, its tool format, and what it is given besides messages."""

    tokenizer: PreTrainedTokenizerBase
    template: str
    form: ToolFormat | None
    tools: list[Any]
    variables: dict[str, Any]
    opens_answer: bool = True

    def of(self, messages: Sequence[Message]) -> tuple[str, Markers | None]:
        """The prompt's text in the first arrangement that the template takes, and what encloses its control tokens."""
        refusal: Exception | None = None
        for arranged in _ARRANGEMENTS:
            try:
                return self._marked(arranged(messages))
            except jinja2.TemplateError as error:
                refusal = refusal or error
        raise PromptError(f"the model's chat template refuses these messages: {refusal}") from refusal

    def _marked(self, messages: list[Message]) -> tuple[str, Markers | None]:
        form, tools, variables = self.form, self.tools, self.variables
        reasoning = reasoning_tags(self.tokenizer, self.template)
        tags = [*(form.tags if form else ()), *((reasoning.open, reasoning.close) if reasoning else ())]
        markers = Markers.for_input(self.tokenizer, self.template, [messages, tools, variables], tags)
        if markers is not None:
            messages = [_marked(message, markers, form) for message in messages]
            tools = markers.mark(tools)
            variables = {name: markers.mark(value) for name, value in variables.items()}
        messages = [_with_call_text(message, form) for message in messages]
        return self._text(messages, tools, variables), markers

    def _text(self, messages: list[Message], tools: list[Any], variables: dict[str, Any]) -> str:
        """Render the template. Raises PromptError if it fails on a caller's value (it may compare, join or index)."""
        settings: dict[str, Any] = {"chat_template": self.template, "tokenize": False}
        settings["add_generation_prompt"] = self.opens_answer
        try:
            return str(self.tokenizer.apply_chat_template(messages, tools=tools or None, **settings, **variables))
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError) as error:
            given = f" with chat_template_kwargs={variables!r}" if variables else ""
            raise PromptError(f"the model's chat template fails on these messages{given}: {error}") from error


def _marked(message: Message, markers: Markers, form: ToolFormat | None) -> Message:
    """Enclose the message's control tokens, except the tags of a broken call, which the model itself wrote."""
    marked: Message = markers.mark(message)
    if form is not None and CALL_TEXT in message:
        marked[CALL_TEXT] = markers.mark(message[CALL_TEXT], spared=form.tags)
    return marked


def _with_call_text(message: Message, form: ToolFormat | None) -> Message:
    if CALL_TEXT not in message:
        return message
    content = message["content"]
    separator = form.separator if form and content else ""
    kept = {key: value for key, value in message.items() if key != CALL_TEXT}
    return {**kept, "content": f"{content}{separator}{message[CALL_TEXT]}"}


def _merged(messages: Sequence[Message]) -> list[Message]:
    """Join all system messages at the front, and neighbours of one role, for templates whose turns must alternate."""
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
    """Move the system text to the start of the first user message, for templates without a system role."""
    merged = _merged(messages)
    if merged[0]["role"] != "system":
        return merged
    return _merged([{**merged[0], "role": "user"}, *merged[1:]])


_ARRANGEMENTS: tuple[Callable[[Sequence[Message]], list[Message]], ...] = (list, _merged, _without_system)


REMEMBERED = 64
"""System turns with tools whose tokens are remembered."""

ASKED = ("A", "1")
"""Two user turns of one character each, of kinds that no tokenizer joins alike with what stands before them."""


class FixedPart:
    """Finds the beginning that all prompts of one system turn and one set of tools share, for one tokenizer.

    It renders them with two different questions and takes what both prompts have in common.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def length(
        self,
        prompt_ids: Sequence[int],
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        settings: Sequence[TemplateSettings] = (),
    ) -> int:
        """Number of tokens of a rendered prompt's fixed beginning; 0 if it does not begin as others would."""
        system = list(takewhile(lambda message: message["role"] == "system", messages))
        key = json.dumps([system, tools, repr(settings)], default=str)
        beginning = self._known.get(key)
        if beginning is None or not _begins(prompt_ids, beginning):  # a template may write today's date
            if len(self._known) >= REMEMBERED:
                self._known.clear()
            beginning = self._known[key] = self._common(system, tools, settings)
        return len(beginning) if _begins(prompt_ids, beginning) else 0

    def text(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, control tokens included."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def _common(
        self, system: list[Message], tools: Sequence[Mapping[str, Any]], settings: Sequence[TemplateSettings]
    ) -> list[int]:
        try:
            prompts = [
                render_prompt(self._tokenizer, [*system, {"role": "user", "content": text}], tools, settings)
                for text in ASKED
            ]
        except PromptError:  # the template wants more than a question; the prompt itself was rendered
            return []
        pairs = takewhile(lambda pair: pair[0] == pair[1], zip(*prompts, strict=False))
        return [token for token, _ in pairs]


def _begins(prompt_ids: Sequence[int], beginning: list[int]) -> bool:
    return len(beginning) < len(prompt_ids) and list(prompt_ids[: len(beginning)]) == beginning
