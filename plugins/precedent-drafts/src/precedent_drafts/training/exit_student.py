"""An exit in training: an adapter behind frozen layers of the target, whose outputs are read once (FREE, 2310.05424).

The loss of a token is the forward divergence to the target plus, from the paper, the distance of the exit's final
hidden state from the target's (its `KD-last`): the squared one, relative to the length of the target's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from precedent.target.load.first_layers import base_of
from precedent_drafts.borrowed import HEAD_TOKENS
from precedent_drafts.early_exit import ADAPTER, ExitAdapter, check_exits
from precedent_drafts.training.block_lessons import BlockLesson
from precedent_drafts.training.divergence import learn_divergence
from precedent_drafts.training.head import OutputHead
from precedent_drafts.training.learned_weights import LearnedWeights


class ExitStudent:
    """A trainable adapter of `width` on a frozen target. `head_tokens` `[tokens]` are the ids that its head covers.

    `layerwise` is the weight of the distance between hidden states.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        head_tokens: Tensor,
        width: int,
        layerwise: float,
        learning_rate: float,
        seed: int = 0,
    ) -> None:
        check_exits(target)
        self.head_tokens, self._layerwise, self._target = head_tokens, layerwise, target
        self._dtype = torch.float64 if target.dtype == torch.float64 else torch.float32
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            adapter = ExitAdapter(target.config.get_text_config().hidden_size, width)
        self.adapter: ExitAdapter = adapter.to(target.device, self._dtype)
        self._norm = base_of(target).norm
        self._head = OutputHead(target, self._dtype, head_tokens)
        self._learned = LearnedWeights(dict(self.adapter.named_parameters()), learning_rate)

    def step(self, lessons: Sequence[BlockLesson], done: float) -> float:
        """Take one step on a batch of lessons and return the mean loss; `done` is the share of all steps done."""
        return self._learned.learn(lambda: self.learn(lessons), done)

    def learn(self, lessons: Sequence[BlockLesson]) -> float:
        """Add the gradient of the mean loss over the tokens to learn, and return that loss.

        Each lesson holds the output of the exit's layer before every token of its answer.
        """
        states, thought, log_total = (
            torch.cat([getattr(lesson, name)[lesson.text.places] for lesson in lessons]).to(self._target.device)
            for name in ("states", "hidden", "log_total")
        )
        hidden = self._final(states.to(self._dtype))
        rows, shares = hidden.detach().requires_grad_(True), torch.full((len(hidden),), 1.0 / len(hidden))
        loss = learn_divergence(self._head, rows, thought, log_total, shares.to(hidden))
        wanted = thought.to(self._dtype)
        distance = ((hidden - wanted).square().sum(-1) / wanted.square().sum(-1)).mean()
        torch.autograd.backward([hidden, self._layerwise * distance], [rows.grad, None])
        return loss + self._layerwise * float(distance.detach())

    def _final(self, states: Tensor) -> Tensor:
        """Final hidden states from outputs of the exit's layer, `[rows, hidden_size]`."""
        found: Tensor = self._norm(self.adapter(states))
        return found

    def weights(self) -> dict[str, Tensor]:
        """The weights to save in a draft's folder, in the target's precision."""
        saved = torch.float32 if self._dtype == self._target.dtype else self._target.dtype
        found = {f"{ADAPTER}{name}": tensor.to(saved) for name, tensor in self.adapter.state_dict().items()}
        return {**found, HEAD_TOKENS: self.head_tokens.to(torch.int32)}

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimiser's moments by name."""
        return self._learned.state()

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Continue from a saved `state`."""
        self._learned.restore(state)
