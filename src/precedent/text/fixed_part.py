"""How many tokens of a chat prompt do not depend on what is asked: those of its system turn and tools."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from precedent.errors import PromptError
from precedent.runtime.process import Lock
from precedent.text.history import Message
from precedent.text.prompt import render_prompt
from precedent.text.template_settings import TemplateSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        self._known: OrderedDict[str, list[int]] = OrderedDict()
        self._lock = Lock()

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
        with self._lock:
            beginning = self._known.get(key)
        if beginning is None or not _begins(prompt_ids, beginning):  # a template may write today's date
            beginning = self._common(system, tools, settings)
            self._remember(key, beginning)
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

    def _remember(self, key: str, beginning: list[int]) -> None:
        with self._lock:
            self._known[key] = beginning
            self._known.move_to_end(key)
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)


def _begins(prompt_ids: Sequence[int], beginning: list[int]) -> bool:
    """Whether a prompt begins so and goes on."""
    return len(beginning) < len(prompt_ids) and list(prompt_ids[: len(beginning)]) == beginning
