"""Trains drafts that draw token after token: chains, chains that read their target, and exits.

A chain is a few layers between the target's embeddings and head. Its loss is the forward divergence to the target.

A chain that reads its target drafts with the target's hidden states of committed tokens, and its own behind them. So
does training: pass 0 reads the target's, and every later one what the pass before it put out, a token further; what is
behind it in the text it sees as earlier passes left it (HASS, 2408.15766). GRIFFIN (2502.11018) leaves a token out of a
later pass unless the pass before had it among its likeliest ones, and its predecessor too: a draft would not have come
there. The loss of a pass also has the smooth L1 distance of the draft's hidden states from the target's, whose place
they take.

An exit is an adapter behind frozen layers of the target, whose outputs are read once (FREE, 2310.05424). Its loss also
has the distance of its final hidden state from the target's (`KD-last`): the squared one, relative to the length of the
target's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss
from transformers import DynamicCache, PreTrainedModel

from precedent.errors import ConfigError, UnsupportedError
from precedent.target.kv.layer_kinds import FULL_ATTENTION, attention_kinds
from precedent.target.load.first_layers import base_of, layers_of
from precedent_drafts.fingerprints import name_of
from precedent_drafts.trained import (
    ADAPTER,
    FUSION,
    LINEAR,
    ConditionedInputs,
    ExitAdapter,
    check_exits,
    conditioned_beside,
    draft_beside,
    fusion_of,
    initial_layers,
    initial_weights,
)
from precedent_drafts.training.lessons import Lesson, Teacher
from precedent_drafts.training.training import Recipe, Student, learn_divergence


def beginning(target: PreTrainedModel, count: int) -> tuple[int, ...]:
    """The target's layers of which a chain begins as copies. Raises ConfigError if it would not be smaller."""
    if len(layers_of(target)) <= count:
        raise ConfigError(f"a draft of {count} layers is not smaller than its target of {len(layers_of(target))}")
    return initial_layers(count, len(layers_of(target)))


@dataclass(frozen=True, kw_only=True)
class ChainRecipe(Recipe):
    """How to train a chain of so many `layers`.

    Each answer is seen with at most `context_tokens` tokens of context. In each of the `rounds` but the first it also
    learns from its own texts.
    """

    kind = "chain"

    layers: int = 2
    context_tokens: int = 256
    rounds: int = 3  # type: ignore[misc]  # a setting of this kind alone

    def teacher(self, target: PreTrainedModel) -> Teacher:
        """The target's distributions alone. Raises ConfigError if the draft would not be smaller than the target."""
        beginning(target, self.layers)
        return Teacher(target)

    def student(self, target: PreTrainedModel, head_tokens: Tensor | None) -> Student:
        """Layers of the target."""
        return ChainStudent(target, head_tokens, self)


class ChainStudent(Student):
    """Trainable copies of some of the target's layers."""

    def __init__(self, target: PreTrainedModel, head_tokens: Tensor | None, recipe: ChainRecipe) -> None:
        super().__init__(target, head_tokens)
        layers = beginning(target, recipe.layers)
        self.own_settings, self._context_tokens = {"initial_layers": layers}, recipe.context_tokens
        self._model = draft_beside(target, layers, initial_weights(target, layers), self.dtype).requires_grad_(False)
        own = base_of(self._model).layers.named_parameters()
        self.trains({f"layers.{name}": weight for name, weight in own}, recipe.learning_rate)

    def learn(self, lessons: Sequence[Lesson], number: int) -> float:
        """Add the gradient of the mean cross-entropy to the target, and return it."""
        share = 1.0 / sum(len(lesson.text.places) for lesson in lessons)
        return sum(self._learn(lesson, share) for lesson in lessons)

    def _learn(self, lesson: Lesson, share: float) -> float:
        text = lesson.text
        start = max(0, text.num_context_tokens - self._context_tokens)
        hidden = self.hidden(text.token_ids[start:-1])[-text.num_answer_tokens :][text.places]
        rows = hidden.detach().requires_grad_(True)
        loss = learn_divergence(self.head, rows, lesson.hidden[text.places], lesson.log_total[text.places], share)
        hidden.backward(rows.grad)
        return loss

    def hidden(self, token_ids: Sequence[int]) -> Tensor:
        """Final hidden states of one text, `[tokens, hidden_size]`."""
        ids = torch.tensor([token_ids], device=self.target.device)
        embedded = self.target.get_input_embeddings()(ids).to(self.dtype)
        hidden: Tensor = base_of(self._model)(inputs_embeds=embedded, use_cache=False).last_hidden_state
        return hidden[0]


@dataclass(frozen=True, kw_only=True)
class ConditionedRecipe(Recipe):
    """How to train a chain that reads its target's hidden states.

    Its `layers` start as copies of the target's, behind a `fusion` of embeddings and hidden states. It learns in
    `passes` passes over each text, with at most `context_tokens` tokens of context; with `mask_top_k` a token counts in
    a later pass only if the pass before had it among so many likeliest ones (0: always).
    """

    kind = "chain that reads its target"

    layers: int = 1
    fusion: str = LINEAR
    passes: int = 3
    mask_top_k: int = 0
    context_tokens: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mask_top_k and self.passes == 1:
            raise ConfigError("mask_top_k leaves tokens out of later passes, and passes=1 has none: give more passes")

    def teacher(self, target: PreTrainedModel) -> Teacher:
        """The final hidden states. Raises UnsupportedError unless all layers are full attention."""
        kinds = attention_kinds(target.config.get_text_config())
        if kinds != {FULL_ATTENTION}:
            raise UnsupportedError(
                f"{name_of(target)} has layers of {', '.join(sorted(map(str, kinds)))}, and a chain that reads its "
                "target (--condition target) is trained on full attention alone: leave --condition out"
            )
        return Teacher(target, None, self.context_tokens)

    def student(self, target: PreTrainedModel, head_tokens: Tensor | None) -> Student:
        """Layers of the target behind a fusion that reads the token alone."""
        return ConditionedStudent(target, head_tokens, self)


@dataclass(frozen=True, slots=True)
class Entries:
    """What a conditioned draft learns from a lesson: entry j reads a hidden state and the token behind it.

    `token_ids` and `states` `[entries, hidden_size]` are read, `wanted` `[entries, hidden_size]` is the target's hidden
    state at that token; `next_ids`, `learned` and `log_total` `[entries]` are the token to predict, whether it is
    learned, and the log-sum-exp of the target's logits before it.
    """

    token_ids: Tensor
    states: Tensor
    wanted: Tensor
    next_ids: Tensor
    learned: Tensor
    log_total: Tensor


class ConditionedStudent(Student):
    """Trainable layers and fusion on a frozen target."""

    def __init__(self, target: PreTrainedModel, head_tokens: Tensor | None, recipe: ConditionedRecipe) -> None:
        super().__init__(target, head_tokens)
        layers = beginning(target, recipe.layers)
        self.own_settings = {"initial_layers": layers, "fusion": recipe.fusion}
        self._passes, self._mask_top_k = recipe.passes, recipe.mask_top_k
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            fused = fusion_of(recipe.fusion, target.config.get_text_config().hidden_size).state_dict()
        begun = initial_weights(target, layers) | {f"{FUSION}{name}": weight for name, weight in fused.items()}
        self.model = conditioned_beside(target, layers, recipe.fusion, begun, self.dtype).requires_grad_(False)
        self.inputs: ConditionedInputs = self.model.get_input_embeddings()  # type: ignore[assignment]
        own = {f"layers.{name}": weight for name, weight in base_of(self.model).layers.named_parameters()}
        own |= {f"{FUSION}{name}": weight for name, weight in self.inputs.fusion.named_parameters()}
        self.trains(own, recipe.learning_rate)

    def learn(self, lessons: Sequence[Lesson], number: int) -> float:
        """Add the gradient of the loss, a mean over passes of means over the tokens that count, and return it."""
        entries = [entries_of(lesson) for lesson in lessons]
        outputs = [self.outputs(each) for each in entries]
        masks = [self.masks(each, rows) for each, rows in zip(entries, outputs, strict=True)]
        counts = [max(1, sum(int(mask.sum()) for mask in of_pass)) for of_pass in zip(*masks, strict=True)]
        shares = [1.0 / count / len(counts) for count in counts]
        return sum(self._learn(*each, shares) for each in zip(entries, outputs, masks, strict=True))

    def outputs(self, entries: Entries) -> list[Tensor]:
        """The final hidden states of every pass, `[entries, hidden_size]` each.

        They are zero, and not computed, where no draft comes in that pass: it would begin before the target's words.
        """
        place, count = self.target.device, len(entries.states)
        with torch.no_grad():
            embedded = self.inputs.embeddings(entries.token_ids.to(place))
        states, cache, found = entries.states.to(place, self.dtype), DynamicCache(), list[Tensor]()
        reached, columns = entries.learned, torch.zeros(0, dtype=torch.long)
        for number in range(self._passes):
            rows = torch.arange(count) if number == 0 else reached.nonzero()[:, 0]
            columns = torch.cat([columns, rows + number * count])
            hidden: Tensor = base_of(self.model)(
                inputs_embeds=self.inputs.fused(embedded[rows], states[rows])[None],
                attention_mask=seen_in_pass(number, count)[rows][:, columns].to(place)[None, None],
                position_ids=rows.to(place)[None],
                past_key_values=cache,
                use_cache=True,
            )[0][0]
            found.append(hidden.new_zeros(count, hidden.shape[1]).index_copy(0, rows.to(place), hidden))
            states = torch.cat([states[:1], found[-1][:-1].detach()])
            reached = reached_next(entries.learned, reached)
            if not bool(reached.any()):
                break
        return [*found, *(torch.zeros_like(found[0]) for _ in range(self._passes - len(found)))]

    @torch.no_grad()
    def masks(self, entries: Entries, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Which tokens count in each pass, `[entries]` each."""
        found = [entries.learned]
        for rows in outputs[:-1]:
            counted = reached_next(entries.learned, found[-1])
            if self._mask_top_k:
                counted[counted.clone()] = self._among_likeliest(
                    rows[counted.to(rows.device)], entries.next_ids[counted]
                )
            found.append(counted)
        return found

    def _among_likeliest(self, rows: Tensor, next_ids: Tensor) -> Tensor:
        """Whether each row has its next token among the likeliest ones, `[rows]`."""
        logits = self.head(rows)
        likeliest = logits.topk(min(self._mask_top_k, logits.shape[-1]), -1).indices.cpu()
        ids = likeliest if self.head_tokens is None else self.head_tokens.cpu()[likeliest]
        return (ids == next_ids[:, None]).any(-1)

    def _learn(
        self, entries: Entries, outputs: Sequence[Tensor], masks: Sequence[Tensor], shares: Sequence[float]
    ) -> float:
        """Add the gradient of all passes over one lesson, and return its part of the loss."""
        loss, roots, gradients = 0.0, list[Tensor](), list[Tensor | None]()
        for hidden, mask, share in zip(outputs, masks, shares, strict=True):
            if not bool(mask.any()):
                continue
            chosen = hidden[mask.to(hidden.device)]
            wanted, totals = entries.wanted[mask].to(chosen), entries.log_total[mask].to(chosen)
            rows = chosen.detach().requires_grad_(True)
            loss += learn_divergence(self.head, rows, wanted, totals, share)
            distance = smooth_l1_loss(chosen, wanted, reduction="none").mean(-1).sum()
            feature = share * distance
            loss += float(feature.detach())
            roots += [chosen, feature]
            gradients += [rows.grad, None]
        if roots:
            torch.autograd.backward(roots, gradients)
        return loss


def entries_of(lesson: Lesson) -> Entries:
    """The entries of a lesson whose states are the target's final hidden states."""
    text, first, count = lesson.text, lesson.first, len(lesson.states) - 1
    ids = torch.tensor(text.token_ids)
    learned, log_total = torch.zeros(len(ids), dtype=torch.bool), lesson.log_total.new_zeros(len(ids))
    learned[text.num_context_tokens + torch.tensor(text.places, dtype=torch.long)] = True
    log_total[text.num_context_tokens :] = lesson.log_total
    predicted = slice(first + 2, first + 2 + count)
    return Entries(
        token_ids=ids[first + 1 : first + 1 + count],
        states=lesson.states[:count],
        wanted=lesson.states[1:],
        next_ids=ids[predicted],
        learned=learned[predicted],
        log_total=log_total[predicted],
    )


def seen_in_pass(number: int, count: int) -> Tensor:
    """Which keys of all passes so far the entries of pass `number` see, `[count, (number + 1) * count]`.

    Entry j sees itself, the entry before it as the pass before left it, and so on; from entry j - `number` down all as
    pass 0 left them.
    """
    behind = torch.arange(count)[:, None] - torch.arange(count)
    return torch.cat([behind >= number, *(behind == number - each for each in range(1, number + 1))], dim=1)


def reached_next(learned: Tensor, counted: Tensor) -> Tensor:
    """Which learned tokens `[entries]` follow one that counted in the pass before."""
    return learned & torch.cat([counted.new_zeros(1), counted[:-1]])


@dataclass(frozen=True, kw_only=True)
class ExitRecipe(Recipe):
    """How to train an exit.

    It stands behind the target's layer `exit_layer`, counted from 1, with a gated unit of `exit_width`.
    """

    kind = "exit"

    exit_layer: int = 4
    exit_width: int = 1024
    batch_texts: int = 8

    def teacher(self, target: PreTrainedModel) -> Teacher:
        """The outputs of the exit's layer. Raises ConfigError for a layer that is not before the target's last."""
        last = len(layers_of(target)) - 1
        if self.exit_layer > last:
            raise ConfigError(f"exit_layer={self.exit_layer}: an exit of this target stands behind layer 1 to {last}")
        return Teacher(target, (self.exit_layer,))

    def student(self, target: PreTrainedModel, head_tokens: Tensor | None) -> Student:
        """An adapter that changes nothing yet."""
        return ExitStudent(target, head_tokens, self)


class ExitStudent(Student):
    """A trainable adapter on a frozen target. Raises UnsupportedError for a target without a place for one."""

    def __init__(self, target: PreTrainedModel, head_tokens: Tensor | None, recipe: ExitRecipe) -> None:
        check_exits(target)
        super().__init__(target, head_tokens)
        self.own_settings = {"exit_layer": recipe.exit_layer}
        with torch.random.fork_rng():
            torch.manual_seed(recipe.seed)
            adapter = ExitAdapter(target.config.get_text_config().hidden_size, recipe.exit_width)
        self.adapter: ExitAdapter = adapter.to(target.device, self.dtype)
        own = self.adapter.named_parameters()
        self.trains({f"{ADAPTER}{name}": weight for name, weight in own}, recipe.learning_rate)

    def learn(self, lessons: Sequence[Lesson], number: int) -> float:
        """Add the gradient of the mean loss over the tokens to learn, and return that loss.

        Each lesson holds the output of the exit's layer before every token of its answer.
        """
        states, thought, log_total = (
            torch.cat([getattr(lesson, name)[lesson.text.places] for lesson in lessons]).to(self.target.device)
            for name in ("states", "hidden", "log_total")
        )
        hidden: Tensor = base_of(self.target).norm(self.adapter(states.to(self.dtype)))
        rows, wanted = hidden.detach().requires_grad_(True), thought.to(self.dtype)
        loss = learn_divergence(self.head, rows, thought, log_total, 1.0 / len(hidden))
        distance = ((hidden - wanted).square().sum(-1) / wanted.square().sum(-1)).mean()
        torch.autograd.backward([hidden, distance], [rows.grad, None])
        return loss + float(distance.detach())
