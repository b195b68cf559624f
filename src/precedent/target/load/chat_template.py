"""Chat templates that a caller supplies, and what is said of a model whose files have none."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import jinja2

from precedent.errors import ConfigError
from precedent.runtime.plain_values import shown

FAMILIES = {
    "chatml": "hermes", "hermes": "hermes", "qwen": "hermes", "llama-3": "llama-3", "gemma": "gemma",
    "mistral": "mistral", "phi-3": "phi-3",
}  # fmt: skip
"""Families by name, and the file of each one's template. That of ChatML takes tools, in the Hermes format."""

FAMILY_MARKS = {
    "<|start_header_id|>": "llama-3", "<|im_start|>": "chatml", "<start_of_turn>": "gemma", "[INST]": "mistral",
    "<|end|>": "phi-3",
}  # fmt: skip
"""Tokens in a template, and the family whose template writes them."""

CHATML = "<|im_end|>"
"""The token of tokenizers that know ChatML, in which models without a template are asked."""

_GENERATION_TAG = re.compile(r"\{%-?\s*(?:end)?generation\s*-?%\}")

log = logging.getLogger(__name__)


def read_chat_template(given: str | Path) -> str:
    """Return the text of a template: of a family by its name, of a file, or the given text itself.

    A JSON file is read as a `tokenizer_config.json`. Raises ConfigError for anything else, and for text that is not
    valid Jinja.
    """
    if not isinstance(given, str | Path):
        raise ConfigError(f"chat_template={shown(given)} must be a text, a file, or one of {', '.join(FAMILIES)}")
    text = _text_of(given)
    try:
        jinja2.Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", text))
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat_template={shown(given)} is not a valid Jinja template: {error}") from error
    return text


def _text_of(given: str | Path) -> str:
    family = FAMILIES.get(str(given).lower())
    if family is not None:
        folder = files("precedent.text").joinpath("templates")
        return folder.joinpath(f"{family}.jinja").read_text(encoding="utf-8").rstrip("\n")
    if isinstance(given, str) and ("{{" in given or "{%" in given):
        return given
    path = Path(given).expanduser()
    try:
        text = path.read_text(encoding="utf-8") if path.is_file() else None
        found: Any = json.loads(text) if text is not None and path.suffix == ".json" else {"chat_template": text}
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read the chat template in {str(path)!r}: {error}") from error
    if text is None:
        raise ConfigError(
            f"chat_template={shown(str(given))} is neither a file, nor the name of a family, nor a Jinja template; "
            f"families: {', '.join(FAMILIES)}"
        )
    template = found.get("chat_template") if isinstance(found, Mapping) else None
    if not isinstance(template, str):
        raise ConfigError(f"{str(path)!r} has no text under 'chat_template': give a file that holds the template")
    return template


def refusing_template(name: str | Path, unread: str) -> str:
    """A template that refuses conversations, for a model whose only template, `unread`, is not in Jinja."""
    family = next((family for mark, family in FAMILY_MARKS.items() if mark in unread), None)
    advice = f"{family!r} has its tokens" if family else f"a text, a file, or one of {', '.join(FAMILIES)}"
    said = f"{name} has only a Go template, which is not read: conversations and tools need chat_template= ({advice})"
    log.warning("%s", said)
    return f"{{{{ raise_exception({json.dumps(said)}) }}}}"


def say_what_lacks(name: str | Path, template: Any, *, has_chatml: bool) -> None:
    """Log that a model has no chat template, as a warning, or that its template takes no tools.

    `has_chatml` says whether its tokenizer knows ChatML, in which it is asked then.
    """
    texts = [str(one) for one in template.values()] if isinstance(template, Mapping) else [str(template or "")]
    supply = f"give chat_template= (--chat-template): a text, a file, or one of {', '.join(FAMILIES)}"
    if not any(texts):
        asked = "asked in ChatML, which it was not trained on" if has_chatml else "refused"
        log.warning(
            "%s has no chat template, so it is a base model: conversations are %s; take its instruct version, or %s",
            name, asked, supply,
        )  # fmt: skip
    elif not any(re.search(r"\btools\b", text) for text in texts):
        shown_in = "shown in ChatML" if has_chatml else "refused"
        log.info("the chat template of %s takes no tools: tools are %s; for another, %s", name, shown_in, supply)
