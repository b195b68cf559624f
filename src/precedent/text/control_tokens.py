"""Control tokens in user or tool text stay text: only those that the chat template writes become tokens.

Tags without a token of their own, such as `<tool_response>` in some models, get the same treatment: templates search
the messages for them and must find only the ones that they wrote themselves.

transformers >= 5.23 can do this (`sanitize_control_tokens=True`). We do it ourselves for every version, because prompt
ids must not depend on the installed version, and because names of parameters and arguments need it too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from precedent.errors import PromptError
from precedent.text.codec import ids_within_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


@dataclass(frozen=True, slots=True)
class Markers:
    """Two characters that do not occur in the input; they enclose its control tokens while the template is rendered."""

    start: str
    end: str
    control_token: re.Pattern[str]

    @classmethod
    def for_input(
        cls, tokenizer: PreTrainedTokenizerBase, template: str, values: Any, tags: Iterable[str] = ()
    ) -> Markers | None:
        """Choose markers for these messages and tools; None if they contain no control token and none of the `tags`."""
        tokens = {*control_tokens(tokenizer, template), *tags}
        text = json.dumps(values, ensure_ascii=False, default=str)
        if not any(json.dumps(token, ensure_ascii=False)[1:-1] in text for token in tokens):
            return None
        unused = (chr(code) for code in _PRIVATE_USE if chr(code) not in text)
        longest_first = sorted(tokens, key=len, reverse=True)
        return cls(next(unused), next(unused), re.compile("|".join(map(re.escape, longest_first))))

    def mark(self, value: Any, spared: Collection[str] = ()) -> Any:
        """Enclose every control token in the texts and keys of `value`, except the `spared` ones if it is a text."""
        if isinstance(value, str):
            return self.control_token.sub(
                lambda found: found[0] if found[0] in spared else f"{self.start}{found[0]}{self.end}", value
            )
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def encode(self, tokenizer: PreTrainedTokenizerBase, rendered: str) -> list[int]:
        """Encode a rendered prompt: enclosed control tokens as plain text, everything else as usual.

        If a template separated a marker from its partner, the marker is dropped; the text that it enclosed still cannot
        merge into a control token.
        """
        enclosed = f"{self.start}({self.control_token.pattern}){self.end}"
        pieces = re.split(f"{enclosed}|[{self.start}{self.end}]", rendered)

        def encode(text: str) -> list[int]:
            return list(tokenizer.encode(text, add_special_tokens=False))

        ids = encode(pieces[0])
        for index, piece in enumerate(pieces[1:], start=1):
            if piece:
                ids += _plain_ids(tokenizer, piece) if index % 2 else ids_within_text(piece, encode)
        return ids


def control_tokens(tokenizer: PreTrainedTokenizerBase, template: str) -> tuple[str, ...]:
    """Special tokens, plus added tokens that the template writes or the tokenizer lists as chat control tokens."""
    listed = set(getattr(tokenizer, "chat_control_tokens", None) or ())
    return tuple(
        token.content
        for token in tokenizer.added_tokens_decoder.values()
        if token.special or (not token.content.isspace() and (token.content in listed or token.content in template))
    )


def _plain_ids(tokenizer: PreTrainedTokenizerBase, control_token: str) -> list[int]:
    """Encode a control token as plain text. Raises PromptError if the tokenizer can only produce the token itself."""
    ids = ids_within_text(control_token, _text_encoder(tokenizer))
    own = tokenizer.convert_tokens_to_ids(control_token)
    if own != tokenizer.unk_token_id and own in ids:
        raise PromptError(f"the tokenizer cannot write {control_token!r} as plain text: remove it from the messages")
    return ids


def _text_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda text: list(tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True))

    def encode(text: str) -> list[int]:
        if backend.normalizer is not None:
            text = backend.normalizer.normalize_str(text)
        splitter = backend.pre_tokenizer
        words = [text] if splitter is None else [word for word, _ in splitter.pre_tokenize_str(text)]
        return [token.id for word in words for token in backend.model.tokenize(word)]

    return encode
