"""What a block draft learns from: texts, what it reads of the target, and the target's distributions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from precedent.errors import ModelLoadError
from precedent.target.load.first_layers import layers_of
from precedent_drafts.training.head import OutputHead, Reader
from precedent_drafts.training.teacher import ROWS_AT_ONCE, fast_reading
from precedent_drafts.training.texts import Text


@dataclass(frozen=True, slots=True)
class BlockLesson:
    """A text whose end is an answer; the last `num_read` tokens but one were read.

    `states` `[num_read, num_layers_read * hidden_size]` are the outputs of the target's layers; `hidden`
    `[num_answer_tokens, hidden_size]` and `log_total` `[num_answer_tokens]` give the target's distribution before each
    token of the answer: final hidden states, and the log-sum-exp of all logits.
    """

    text: Text
    states: Tensor
    hidden: Tensor
    log_total: Tensor

    @property
    def first(self) -> int:
        """Index of the first token that was read."""
        return len(self.text.token_ids) - 1 - len(self.states)

    @property
    def read_ids(self) -> Tensor:
        """The token ids that were read, `[num_read]`."""
        return torch.tensor(self.text.token_ids[self.first : -1])

    @property
    def anchors(self) -> list[int]:
        """Indices of tokens behind which a block may begin: those before tokens to learn."""
        return [self.text.num_context_tokens + place - 1 for place in self.text.places]


@dataclass(frozen=True, slots=True)
class BlockShard:
    """Lessons made together; `frequencies` `[vocab_size]` is the mass that the target gave each token."""

    lessons: tuple[BlockLesson, ...]
    frequencies: Tensor

    @property
    def num_tokens(self) -> int:
        """Number of tokens to learn."""
        return sum(len(lesson.text.places) for lesson in self.lessons)

    def save(self, path: Path) -> None:
        """Write the shard atomically."""
        path.parent.mkdir(parents=True, exist_ok=True)
        tensors, texts = {"frequencies": self.frequencies}, []
        for number, lesson in enumerate(self.lessons):
            tensors |= {f"{number}.{name}": getattr(lesson, name) for name in ("states", "hidden", "log_total")}
            texts.append([lesson.text.token_ids, lesson.text.num_answer_tokens, lesson.text.learned])
        partial = path.with_name(f"{path.name}.partial")
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, partial, {"texts": json.dumps(texts)}
        )
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> BlockShard:
        """Read a shard. Raises ModelLoadError if the file is damaged."""
        try:
            with safe_open(path, framework="pt") as opened:
                texts: list[Any] = json.loads(opened.metadata()["texts"])
                parts = [
                    [opened.get_tensor(f"{number}.{name}") for name in ("states", "hidden", "log_total")]
                    for number in range(len(texts))
                ]
                frequencies = opened.get_tensor("frequencies")
            found = [Text(tuple(token_ids), count, tuple(learned)) for token_ids, count, learned in texts]
            return cls(tuple(BlockLesson(text, *each) for text, each in zip(found, parts, strict=True)), frequencies)
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ModelLoadError(f"{path} is damaged ({error}); delete it, and --resume rewrites it") from error


class BlockTeacher:
    """Runs the target over texts and keeps what a draft that reads it has to learn from them.

    States are the outputs of the layers `reads`, counted from 1; of width 0 if there are none; with None the final
    hidden states.
    """

    def __init__(self, target: PreTrainedModel, reads: Sequence[int] | None, context_tokens: int) -> None:
        reading = fast_reading(target)
        self.reads, self.context_tokens = None if reads is None else tuple(reads), context_tokens
        self._dtype, self._reader = target.dtype, Reader(reading)
        self._layers = [layers_of(reading)[number - 1] for number in reads or ()]
        self._head = OutputHead(target, torch.float64 if target.dtype == torch.float64 else torch.float32)

    @torch.no_grad()
    def shard(self, texts: Sequence[Text]) -> BlockShard:
        """Make the lessons of some texts, on the CPU."""
        frequencies = torch.zeros(self._head.weight.shape[0], device=self._head.weight.device)
        lessons = tuple(self._lesson(text, frequencies) for text in texts)
        return BlockShard(lessons, frequencies.cpu())

    def _lesson(self, text: Text, frequencies: Tensor) -> BlockLesson:
        count = min(len(text.token_ids) - 1, text.num_answer_tokens + self.context_tokens)
        last, states = self._read(text.token_ids[:-1], count)
        hidden, totals = last[-text.num_answer_tokens :], []
        for rows in hidden.split(ROWS_AT_ONCE):
            logits = self._head(rows)
            totals.append(logits.logsumexp(-1))
            frequencies += (logits - totals[-1][:, None]).exp_().sum(0)
        states, hidden = states.to("cpu", self._dtype), hidden.to("cpu", self._dtype, copy=self.reads is None)
        return BlockLesson(text, states, hidden, torch.cat(totals).cpu())

    def _read(self, token_ids: Sequence[int], count: int) -> tuple[Tensor, Tensor]:
        """Final hidden states and what is kept as states, of the last `count` tokens."""
        seen: list[Tensor] = []

        def see(layer: Any, inputs: Any, output: Any) -> None:
            seen.append((output if isinstance(output, Tensor) else output[0])[0, -count:])

        with ExitStack() as hooks:
            for layer in self._layers:
                hooks.callback(layer.register_forward_hook(see).remove)
            hidden = self._reader.last(token_ids, count)
        return hidden, hidden if self.reads is None else torch.cat([hidden[:, :0], *seen], dim=-1)
