"""What a draft learns from: texts, with the target's final hidden state at every position of an answer.

A hidden state holds the teacher's whole distribution in a few hundred numbers instead of one per vocabulary entry. The
shared output head turns it back into logits when training needs them, so the target runs over each text only once.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from precedent.errors import ModelLoadError


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of which the last `num_answer_tokens` are learned; those before them are context.

    `learned` `[num_answer_tokens]` selects the tokens to learn, all if empty. In a conversation with several turns only
    the target's own words need drafting; learning a customer's words would waste a small draft's capacity.
    """

    token_ids: tuple[int, ...]
    num_answer_tokens: int
    learned: tuple[bool, ...] = ()

    @property
    def num_context_tokens(self) -> int:
        """Number of tokens before the answer."""
        return len(self.token_ids) - self.num_answer_tokens

    @property
    def places(self) -> list[int]:
        """Positions in the answer of the tokens to learn, ascending."""
        every = range(self.num_answer_tokens)
        return [place for place in every if self.learned[place]] if self.learned else list(every)


@dataclass(frozen=True, slots=True)
class Lesson:
    """A text and the target's distribution before each learned token of its answer.

    `hidden` `[num_learned, hidden_size]` holds final hidden states, `log_total` `[num_learned]` the log-sum-exp of all
    logits.
    """

    text: Text
    hidden: Tensor
    log_total: Tensor

    @property
    def num_learned(self) -> int:
        """Number of tokens to learn."""
        return self.log_total.numel()


@dataclass(frozen=True, slots=True)
class Shard:
    """Lessons made together; `frequencies` `[vocab_size]` is the mass that the target gave each token."""

    lessons: tuple[Lesson, ...]
    frequencies: Tensor

    @property
    def num_tokens(self) -> int:
        """Number of tokens to learn."""
        return sum(lesson.num_learned for lesson in self.lessons)

    def save(self, path: Path) -> None:
        """Write the shard atomically."""
        partial = path.with_name(f"{path.name}.partial")
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors = {
            "token_ids": torch.tensor([token for lesson in self.lessons for token in lesson.text.token_ids]),
            "hidden": torch.cat([lesson.hidden for lesson in self.lessons]),
            "log_total": torch.cat([lesson.log_total for lesson in self.lessons]),
            "frequencies": self.frequencies,
            "learned": torch.cat([_marks(lesson.text) for lesson in self.lessons]),
        }
        lengths = [[len(lesson.text.token_ids), lesson.text.num_answer_tokens] for lesson in self.lessons]
        save_file(tensors, partial, metadata={"lengths": json.dumps(lengths)})
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Shard:
        """Read a shard. Raises ModelLoadError if the file is damaged."""
        try:
            with safe_open(path, framework="pt") as opened:
                lengths: list[list[int]] = json.loads(opened.metadata()["lengths"])
                tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  # not a mapping
            return cls(tuple(_lessons(lengths, tensors)), tensors["frequencies"])
        except (OSError, SafetensorError, ValueError, KeyError, RuntimeError) as error:
            raise ModelLoadError(f"{path} is damaged ({error}); delete it, and --resume rewrites it") from error


def _marks(text: Text) -> Tensor:
    """Whether each token of the answer is learned."""
    return torch.tensor(text.learned or (True,) * text.num_answer_tokens, dtype=torch.bool)


def _lessons(lengths: Sequence[Sequence[int]], tensors: dict[str, Tensor]) -> list[Lesson]:
    token_ids = tensors["token_ids"].split([total for total, _ in lengths])
    marks = tensors["learned"].split([answer for _, answer in lengths])
    learned = [int(mark.sum()) for mark in marks]
    distributions = zip(tensors["hidden"].split(learned), tensors["log_total"].split(learned), strict=True)
    return [
        Lesson(Text(tuple(ids.tolist()), mark.numel(), () if mark.all() else tuple(mark.tolist())), hidden, log_total)
        for ids, mark, (hidden, log_total) in zip(token_ids, marks, distributions, strict=True)
    ]
