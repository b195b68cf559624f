"""What a draft learns from: texts, what it reads of the target, and the target's distributions.

A final hidden state holds the target's whole distribution in a few hundred numbers instead of one per vocabulary entry.
The shared output head turns it back into logits when training needs them, so the target reads each text only once.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.nn.functional import linear
from transformers import DynamicCache, PreTrainedModel, PreTrainedTokenizerBase

from precedent.config import EngineLimits, SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ModelLoadError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.runtime.instructions import native_bfloat16
from precedent.target import common_prefix
from precedent.target.kv.layer_kinds import FULL_ATTENTION, attention_kinds
from precedent.target.load.first_layers import base_of, layers_of
from precedent_drafts.fingerprints import name_of
from precedent_drafts.trained import save_tensors

PROBE = (0, 1, 1, 0, 1)
"""Token ids on which the head is compared with the model's own; valid in any vocabulary."""

TOLERANCE = 0.05
"""Accepted relative difference in that comparison: rounding in the lowest precision."""


class OutputHead:
    """`weight [tokens, hidden_size]`, followed by the logit scaling and capping of some architectures, in `dtype`."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype, token_ids: Tensor | None = None) -> None:
        head: Any = model.get_output_embeddings()
        ids = slice(None) if token_ids is None else token_ids.to(head.weight.device)
        self.weight = head.weight.detach()[ids].to(dtype)
        self.bias = None if head.bias is None else head.bias.detach()[ids].to(dtype)
        config = model.config.get_text_config()
        scale, divisor = (float(getattr(config, name, 1.0) or 1.0) for name in ("logit_scale", "logits_scaling"))
        self._scale, self._cap = scale / divisor, getattr(config, "final_logit_softcapping", None)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Hidden states `[rows, hidden_size]` to logits `[rows, tokens]`."""
        logits = linear(hidden.to(self.weight.dtype), self.weight, self.bias) * self._scale
        return logits if self._cap is None else torch.tanh(logits / self._cap) * self._cap


class Reader:
    """Runs a model over texts one after the other, reusing the KV cache of the prefix that a text shares with the last.

    An agent's texts share the system turn with all its tools, which is most of each text. A processor without bfloat16
    arithmetic reads a float32 copy of the model: it is much faster, and the same up to rounding.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        slow = model.device.type == "cpu" and model.dtype == torch.bfloat16 and not native_bfloat16()
        self.model = copy.deepcopy(model).float() if slow else model
        self._cache, self._token_ids = DynamicCache(), tuple[int, ...]()
        self._rewinds = attention_kinds(model.config.get_text_config()) == {FULL_ATTENTION}

    @torch.no_grad()
    def last(self, token_ids: Sequence[int], count: int) -> Tensor:
        """The final hidden states of the last `count` tokens of a text, `[count, hidden_size]`."""
        shared = min(common_prefix(self._token_ids, token_ids), len(token_ids) - count) if self._rewinds else 0
        if not shared:
            self._cache = DynamicCache()
        elif shared < len(self._token_ids):
            self._cache.crop(shared - len(self._token_ids))  # a negative number says how many to remove
        self._token_ids = ()  # if the forward pass fails, the cache holds no whole text
        ids = torch.tensor([token_ids[shared:]], device=self.model.device)
        hidden: Tensor = base_of(self.model)(input_ids=ids, past_key_values=self._cache, use_cache=True)[0]
        self._token_ids = tuple(token_ids)
        return hidden[0, -count:]


@torch.no_grad()
def check_trainable(target: PreTrainedModel) -> None:
    """Raise UnsupportedError if no draft can be trained on a target's embeddings, layers and head."""
    if getattr(target.config, "quantization_config", None) is not None:
        raise UnsupportedError(
            f"{name_of(target)} is quantised, so no layers can be copied from it; load it in full precision"
        )
    layers_of(target)
    ids = torch.tensor([PROBE], device=target.device)
    expected = target(input_ids=ids, use_cache=False).logits[0].float()
    found = OutputHead(target, torch.float32)(base_of(target)(input_ids=ids, use_cache=False).last_hidden_state[0])
    error = float((found - expected).norm() / (expected - expected.mean()).norm())
    if not error <= TOLERANCE:
        raise UnsupportedError(
            f"{type(target).__name__} does more to its logits than its output head ({error:.2g} off), so no draft can "
            "be trained for it; give a smaller model with the same tokenizer as the draft model"
        )


# Texts and lessons

AT_ONCE = 16
"""Number of requests sampled together."""

ROWS_AT_ONCE = 256
"""Number of full-vocabulary logit rows held at a time."""

PARTS = ("states", "hidden", "log_total")


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
    """A text whose end is an answer; the last `num_read` tokens but one were read.

    `states` `[num_read, num_layers_read * hidden_size]` are what the draft reads of them; `hidden`
    `[num_answer_tokens, hidden_size]` and `log_total` `[num_answer_tokens]` give the target's distribution before each
    token of the answer: final hidden states, and the log-sum-exp of all logits.
    """

    text: Text
    states: Tensor
    hidden: Tensor
    log_total: Tensor

    def to(self, place: torch.device) -> Lesson:
        """The same on a device."""
        return replace(self, **{name: getattr(self, name).to(place) for name in PARTS})

    @property
    def first(self) -> int:
        """Index of the first token that was read."""
        return len(self.text.token_ids) - 1 - len(self.states)

    @property
    def read_ids(self) -> Tensor:
        """The token ids that were read, `[num_read]`."""
        return torch.tensor(self.text.token_ids[self.first : -1], device=self.states.device)

    @property
    def anchors(self) -> list[int]:
        """Indices of the tokens before those to learn."""
        return [self.text.num_context_tokens + place - 1 for place in self.text.places]


@dataclass(frozen=True, slots=True)
class Shard:
    """Lessons made together; `frequencies` `[vocab_size]` is the mass that the target gave each token."""

    lessons: tuple[Lesson, ...]
    frequencies: Tensor

    @property
    def num_tokens(self) -> int:
        """Number of tokens to learn."""
        return sum(len(lesson.text.places) for lesson in self.lessons)

    def save(self, path: Path) -> None:
        """Write the shard."""
        tensors, texts = {"frequencies": self.frequencies}, []
        for number, lesson in enumerate(self.lessons):
            tensors |= {f"{number}.{name}": getattr(lesson, name) for name in PARTS}
            texts.append([lesson.text.token_ids, lesson.text.num_answer_tokens, lesson.text.learned])
        save_tensors(path, tensors, texts=json.dumps(texts))

    @classmethod
    def load(cls, path: Path) -> Shard:
        """Read a shard. Raises ModelLoadError if the file is damaged."""
        try:
            with safe_open(path, framework="pt") as opened:
                texts: list[Any] = json.loads(opened.metadata()["texts"])
                lessons = tuple(
                    Lesson(
                        Text(tuple(token_ids), count, tuple(learned)),
                        *(opened.get_tensor(f"{number}.{name}") for name in PARTS),
                    )
                    for number, (token_ids, count, learned) in enumerate(texts)
                )
                return cls(lessons, opened.get_tensor("frequencies"))
        except (OSError, SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
            raise ModelLoadError(f"{path} is damaged ({error}); delete it, and --resume rewrites it") from error


class Author:
    """Samples continuations without speculation, in a private engine; the same seeds give the same texts."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, temperature: float) -> None:
        plain = SpeculationConfig(enabled=False, write_back=False)
        options = EngineOptions(speculation=plain, limits=EngineLimits(max_running=AT_ONCE))
        self._engine = Engine(model, tokenizer, options, name="teacher", cost=CostCurve())
        self._temperature = temperature

    def texts(self, contexts: Sequence[tuple[int, ...]], seeds: Sequence[int], max_tokens: int) -> list[Text]:
        """Continue each context by at most `max_tokens`; skips contexts that leave no room and empty answers."""
        room = self._engine.context_length - 1
        running = [
            (context, self._engine.submit(context, SamplingParams(self._temperature, seed=seed, max_tokens=max_tokens)))
            for context, seed in zip(contexts, seeds, strict=True)
            if len(context) < room
        ]
        answers = [(context, generation.result().token_ids) for context, generation in running]
        return [Text((*context, *answer), len(answer)) for context, answer in answers if answer]

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()


class Teacher:
    """Runs the target over texts and keeps what a draft has to learn from them.

    States are the outputs of the layers `reads`, counted from 1, of at most `context_tokens` tokens of context; of
    width 0 if there are none; with None the final hidden states.
    """

    def __init__(self, target: PreTrainedModel, reads: Sequence[int] | None = (), context_tokens: int = 0) -> None:
        self.reads, self.context_tokens = None if reads is None else tuple(reads), context_tokens
        self._dtype, self._reader = target.dtype, Reader(target)
        self._layers = [layers_of(self._reader.model)[number - 1] for number in reads or ()]
        self._head = OutputHead(target, torch.float64 if target.dtype == torch.float64 else torch.float32)

    @torch.no_grad()
    def shard(self, texts: Sequence[Text]) -> Shard:
        """Make the lessons of some texts, on the CPU."""
        frequencies = torch.zeros(self._head.weight.shape[0], device=self._head.weight.device)
        lessons = tuple(self._lesson(text, frequencies) for text in texts)
        return Shard(lessons, frequencies.cpu())

    def _lesson(self, text: Text, frequencies: Tensor) -> Lesson:
        count = min(len(text.token_ids) - 1, text.num_answer_tokens + self.context_tokens)
        last, states = self._read(text.token_ids[:-1], count)
        hidden, totals = last[-text.num_answer_tokens :], []
        learned = torch.zeros(len(hidden), 1, device=frequencies.device)
        learned[text.places] = 1.0
        for rows, counted in zip(hidden.split(ROWS_AT_ONCE), learned.split(ROWS_AT_ONCE), strict=True):
            logits = self._head(rows)
            totals.append(logits.logsumexp(-1))
            frequencies += ((logits - totals[-1][:, None]).exp_() * counted).sum(0)
        states, hidden = states.to("cpu", self._dtype), hidden.to("cpu", self._dtype, copy=self.reads is None)
        return Lesson(text, states, hidden, torch.cat(totals).cpu())

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
