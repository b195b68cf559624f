"""Texts to train a draft on: prompts of chat traces, benchmark questions or plain texts, and cached completions."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from precedent.cache import SQLiteStore, tokenizer_fingerprint
from precedent.errors import CacheError, PromptError
from precedent.text.prompt import render_prompt
from precedent.text.traces import Trajectory, read_trajectories
from precedent_drafts.training.lessons import Text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Prompt = tuple[int, ...]

HELD_OUT_SHARE, MOST_HELD_OUT = 10, 64
"""One prompt in ten is held out for the report, at least one and at most 64."""

ONE_QUESTION = ("turns", "prompt")
"""Fields of a JSON line that holds a question: a list of texts, of which the first is asked (Spec-Bench), or a text."""


def read_prompts(path: Path, tokenizer: PreTrainedTokenizerBase, max_tokens: int) -> tuple[list[Prompt], int]:
    """Read the distinct prompts of a file in order; returns them and how many were dropped as longer than `max_tokens`.

    A `.txt` file holds one prompt per line. JSON lines (also .gz) are questions (`turns` or `prompt`) or chat traces as
    `precedent replay` reads them; each assistant turn gives one prompt, the conversation before it.
    Raises PromptError if the file cannot be read or holds no prompt.
    """
    rendered = (tuple(render_prompt(tokenizer, messages, tools)) for messages, tools in _conversations(path))
    prompts = list(dict.fromkeys(rendered))
    short = [prompt for prompt in prompts if len(prompt) <= max_tokens]
    if not short:
        reason = f"all {len(prompts)} are longer than {max_tokens} tokens" if prompts else "it is empty"
        raise PromptError(f"{path} holds no prompt to train on: {reason}")
    return short, len(prompts) - len(short)


def fingerprint_of(texts: Sequence[Sequence[int]]) -> str:
    """A hash of texts and their order."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(np.asarray([len(text), *text], dtype="<i8").tobytes())
    return digest.hexdigest()[:32]


def split(prompts: Sequence[Prompt], seed: int) -> tuple[list[Prompt], list[Prompt]]:
    """Split by `seed` into prompts to train on and prompts held out for the report; at least two are needed."""
    if len(prompts) < 2:
        raise PromptError("one prompt is too few: give a second one, which the report keeps out of training")
    order = np.random.default_rng(seed).permutation(len(prompts))
    count = min(MOST_HELD_OUT, max(1, len(prompts) // HELD_OUT_SHARE))
    held_out = set(order[:count].tolist())
    return [prompts[i] for i in order.tolist() if i not in held_out], [prompts[i] for i in sorted(held_out)]


def _conversations(path: Path) -> Iterator[tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Messages and tools of every prompt."""
    first = next(_lines(path), "")
    question = path.suffix == ".txt" or _is_question(first)
    if question:
        for line in _lines(path):
            yield [{"role": "user", "content": line if path.suffix == ".txt" else _asked(path, line)}], []
        return
    for trajectory in read_trajectories([path]):
        for messages in _asked_before_answers(trajectory):
            yield messages, list(trajectory.tools)


def _lines(path: Path) -> Iterator[str]:
    opened = gzip.open if path.suffix == ".gz" else open
    try:
        with opened(path, "rt", encoding="utf-8") as lines:
            yield from (line.strip() for line in lines if line.strip())
    except (OSError, UnicodeDecodeError, EOFError) as error:
        raise PromptError(f"cannot read {path}: {error}") from error


def _is_question(line: str) -> bool:
    try:
        record = json.loads(line)
    except ValueError:
        return False
    return isinstance(record, dict) and any(field in record for field in ONE_QUESTION)


def _asked(path: Path, line: str) -> str:
    try:
        record = json.loads(line)
        return str(record["turns"][0] if "turns" in record else record["prompt"])
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise PromptError(f"{path} holds a line that is not a question: {line[:80]!r}") from error


def _asked_before_answers(trajectory: Trajectory) -> Iterator[list[dict[str, Any]]]:
    """The messages before each assistant turn (before the last, for a single call); all if there is no answer."""
    messages = [_plain(message) for message in trajectory.messages]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i > 0]
    for place in (answers[-1:] if trajectory.only_last else answers) or [len(messages)]:
        yield messages[:place]


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message with plain text content; other content parts are dropped."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return {**message, "content": content}


def read_completions(path: Path, tokenizer: PreTrainedTokenizerBase, tenant: str, max_tokens: int) -> list[Text]:
    """Read one tenant's completions from a cache, newest first, each cut to `max_tokens`; the cache is not changed.

    A cache keeps no prompts, so the completion's recall query replaces its prompt, as a user message. Raises CacheError
    if the cache cannot be read, or holds no completions of this tenant and tokenizer.
    """
    store = SQLiteStore.open(path, read_only=True)
    try:
        found = store.since(tenant, tokenizer_fingerprint(tokenizer))
    finally:
        store.close()
    if not found:
        raise CacheError(
            f"{path} holds no completions of tenant {tenant!r} for this model's tokenizer; see precedent cache stats"
        )
    texts = []
    for completion in reversed(found):
        asked = render_prompt(tokenizer, [{"role": "user", "content": completion.query}])
        answer = completion.token_ids[:max_tokens]
        texts.append(Text((*asked, *answer), len(answer)))
    return texts
