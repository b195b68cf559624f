"""The tokens that end an answer, collected from every source that knows one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENIZER, GENERATION_CONFIG, CONFIG, BY_NAME = "tokenizer", "generation_config", "config", "name"

END_TOKEN_NAMES = (
    "<|im_end|>", "<end_of_turn>", "<turn|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|return|>", "<|call|>",
    "<|end_of_text|>", "<|endoftext|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<end_of_utterance>",
    "<|END_OF_TURN_TOKEN|>", "<|eot|>", "<|eom|>", "<|end▁of▁sentence|>", "<|flush|>", "<|calls|>",
)  # fmt: skip
"""Tokens with which known families end a turn or a text. llama.cpp collects end tokens by name in the same way."""

BETWEEN_MESSAGES = {"<|end|>": ({"<|return|>", "<|call|>"}, {"<|flush|>", "<|calls|>"})}
"""Names that only separate messages of one answer in vocabularies that also have these (Harmony, Solar)."""


@dataclass(frozen=True, slots=True)
class EndToken:
    """A token that ends an answer, and the sources that say so."""

    token_id: int
    text: str
    sources: tuple[str, ...]


def end_tokens(
    tokenizer: PreTrainedTokenizerBase, configured: Mapping[str, int | Iterable[int] | None] | None = None
) -> tuple[EndToken, ...]:
    """Collect the end tokens of a model, ordered by id.

    `configured` maps the name of a source to the ids that it gives. Added are the tokenizer's own end token, and the
    tokens named in `END_TOKEN_NAMES` which the vocabulary marks as control tokens: a token of that name without the
    mark is text, which a model may write.
    """
    sources: dict[int, list[str]] = {}
    listed = {**(configured or {}), TOKENIZER: getattr(tokenizer, "eos_token_id", None)}
    for source, ids in listed.items():
        for token_id in _ids(ids):
            sources.setdefault(token_id, []).append(source)
    for token_id in _named(tokenizer):
        sources.setdefault(token_id, []).append(BY_NAME)
    return tuple(EndToken(one, _text(tokenizer, one), tuple(found)) for one, found in sorted(sources.items()))


def end_token_ids(model: Any, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Ids of the end tokens of a model or target, by its `config` and `generation_config`."""
    found = end_tokens(tokenizer, configured_ends(model.config, getattr(model, "generation_config", None)))
    return frozenset(one.token_id for one in found)


def configured_ends(config: Any, generation_config: Any) -> dict[str, Any]:
    """The end tokens of a model's two configs, by source.

    transformers fills in a default where `config.json` names none, which belongs to another checkpoint: only an id that
    differs from the default of the config's class counts.
    """
    text = config.get_text_config()
    return {
        GENERATION_CONFIG: getattr(generation_config, "eos_token_id", None),
        CONFIG: text.to_diff_dict().get("eos_token_id"),
    }


def turn_end(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """The token that ends an assistant's turn in the chat template; the tokenizer's end token where none does."""
    own: int | None = getattr(tokenizer, "eos_token_id", None)
    template = str(getattr(tokenizer, "chat_template", None) or "")
    eos = str(getattr(tokenizer, "eos_token", None) or "")
    if own is not None and (not template or eos in template or "eos_token" in template):
        return own
    written = [(template.find(_text(tokenizer, one)), one) for one in _named(tokenizer)]
    return min(((place, one) for place, one in written if place >= 0), default=(0, own))[1]


def _named(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    added = getattr(tokenizer, "added_tokens_decoder", None) or {}
    control = {token.content: token_id for token_id, token in added.items() if token.special}
    return [
        control[name]
        for name in END_TOKEN_NAMES
        if name in control and not any(others <= control.keys() for others in BETWEEN_MESSAGES.get(name, ()))
    ]


def _ids(ids: int | Iterable[int] | None) -> list[int]:
    listed = [] if ids is None else [ids] if isinstance(ids, int) else list(ids)
    return [int(one) for one in listed if one is not None and one >= 0]  # some configs write -1 for none


def _text(tokenizer: PreTrainedTokenizerBase, token_id: int) -> str:
    text: Any = tokenizer.convert_ids_to_tokens(token_id) if token_id < len(tokenizer) else None
    return str(text or "")
