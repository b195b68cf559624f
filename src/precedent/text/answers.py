"""How to read one model's answers: its tool format, its reasoning tags, and which special tokens stay in the text."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precedent.text.detokenizer import decoded, hidden_tokens, special_token_ids
from precedent.text.history import Message
from precedent.text.prompt import template_for
from precedent.text.tool_formats import AnswerParser, ToolFormat, format_of_template
from precedent.text.tool_formats.harmony import HarmonyParser
from precedent.text.tool_formats.parser import TaggedParser
from precedent.text.tool_formats.reasoning import ReasoningTags, reasoning_tags
from precedent.text.tool_formats.response_template import ResponseTemplateParser, reads_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TAIL_TOKENS = 32
"""Number of tokens at the end of a prompt that are searched for an open reasoning tag."""


@dataclass(frozen=True, slots=True)
class AnswerSyntax:
    """How to read the answers to one prompt.

    `form` is the tool format, None if no tool is bound or if the tokenizer's own response template reads the calls.
    `shown_tokens` are the ids of special tokens that stay in the answer's text because they mark calls or reasoning.
    """

    tokenizer: PreTrainedTokenizerBase
    prompt_ids: tuple[int, ...]
    tools: tuple[Mapping[str, Any], ...]
    form: ToolFormat | None
    reasoning: ReasoningTags | None
    shown_tokens: frozenset[int]
    channels: bool = False
    by_response_template: bool = False

    def parser(self) -> AnswerParser:
        """Create a parser for one answer; feed it the text from the first character on."""
        if self.by_response_template:
            return ResponseTemplateParser(self.tokenizer, str(self.tokenizer.decode(list(self.prompt_ids))), self.tools)
        if self.channels:
            return HarmonyParser(self.form, self.tools)
        return TaggedParser(self.form, self.reasoning, self.tools, in_reasoning=self.opened_by_prompt)

    def token_ranges(self, token_ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> list[range]:
        """Map spans of the answer's text (first character, last character + 1) to ranges of token positions."""
        hidden = hidden_tokens(self.tokenizer, self.shown_tokens) if spans else None

        def tokens_up_to(length: int) -> int:
            """The smallest number of leading tokens whose text has `length` characters."""
            return bisect_left(
                range(len(token_ids)), length, key=lambda count: len(decoded(self.tokenizer, token_ids[:count], hidden))
            )

        return [range(tokens_up_to(start), tokens_up_to(end)) for start, end in spans]

    @property
    def opened_by_prompt(self) -> bool:
        """Whether the prompt ends inside the reasoning."""
        if self.reasoning is None:
            return False
        tail = self.tokenizer.decode(list(self.prompt_ids[-TAIL_TOKENS:]), skip_special_tokens=False)
        return str(tail).rstrip().endswith(self.reasoning.open.rstrip())


def answer_syntax(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    prompt_ids: Sequence[int],
) -> AnswerSyntax:
    """Work out how to read the answer to a rendered prompt. Raises UnsupportedError if the tool format is unknown."""
    template = template_for(tokenizer, messages, bool(tools))
    form = format_of_template(template)
    own = bool(tools) and form is None and reads_calls(tokenizer)
    channels = form is not None and form.channels
    reasoning = None if channels or own else reasoning_tags(tokenizer, template)
    special = special_token_ids(tokenizer)
    tags = [
        *(form.tags if form and (tools or channels) else ()),
        *((reasoning.open, reasoning.close) if reasoning else ()),
    ]
    shown = frozenset(token for token, text in special.items() if own or any(text in tag for tag in tags))
    return AnswerSyntax(
        tokenizer=tokenizer,
        prompt_ids=tuple(prompt_ids),
        tools=tuple(tools),
        form=form if tools else None,
        reasoning=reasoning,
        shown_tokens=shown,
        channels=channels,
        by_response_template=own,
    )
