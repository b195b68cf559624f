"""An engine on a tiny Hugging Face model whose logits follow a script, to test whole agents without weights.

Only the script is fake. The tokenizer, the chat template, the KV cache, candidate trees, constraints, verification,
the scheduler and the speculation cache are real.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Executor
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor

from precedent.engine.engine import Engine, Generation, ResultObserver
from precedent.engine.options import EngineOptions
from precedent.planning.costs import CostCurve
from precedent.runtime.background import AtOnce
from precedent.target import Target, TargetModel
from precedent.target.contract import Commit, Slot
from precedent.tree import ROOT, CandidateTree
from precedent_testing.overheard import LISTENER
from precedent_testing.scripted_engine import WEIGHTS, Script, ScriptedText, answers_of, forbidden
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["fixed_cost", "scripted_model_engine", "scripted_tokenizer"]

CONTEXT_LENGTH = 16_384

MILLISECONDS = ((1, 4.0), (8, 4.2), (32, 5.0))
"""Fixed step costs by width, so that every machine plans the same trees."""


class Scripted(Target):
    """Lets a target, of whichever class stands beside it, follow a script.

    That is a function of the prompt's text, a list of answers, or a conversation. A request fails with a
    GenerationError if its answer leaves the script, layout aside, because a constraint forbade a token. With
    `may_stray` it ends as soon as it can instead; only then do the model's own logits matter.
    """

    _scripts: Any = None

    def follow(self, tokenizer: PreTrainedTokenizerBase, script: Script, *, may_stray: bool = False) -> Self:
        """Follow this script from now on."""
        self._tokenizer, self._answer_to, self._may_stray = tokenizer, answers_of(script), may_stray
        self._scripts = weakref.WeakKeyDictionary[Slot, ScriptedText]()
        return self

    def begin_prefill(self, slot: Slot, prompt_ids: Sequence[int]) -> int:
        """As `Target.begin_prefill`; asks the script for the answer to this prompt."""
        reused = super().begin_prefill(slot, prompt_ids)
        answer = self._answer_to(str(self._tokenizer.decode(list(prompt_ids))))
        self._scripts[slot] = ScriptedText(self._tokenizer, len(prompt_ids), answer)
        return reused

    @torch.inference_mode()
    def score(self, batch: Sequence[tuple[Slot, CandidateTree]]) -> list[Tensor]:
        """As `Target.score`, but every row puts the script's next token far above all others."""
        scored = super().score(batch)  # type: ignore[safe-super]  # that of the class beside
        if not self._scripts:  # a target may try itself out before it has a script
            return scored
        return [self._follow(logits, *pair) for logits, pair in zip(scored, batch, strict=True)]

    def commit_all(self, batch: Sequence[Commit]) -> list[Exception | None]:
        """As `Target.commit_all`; also returns an error for an answer that has left the script."""
        errors = super().commit_all(batch)  # type: ignore[safe-super]
        return [error or self._strayed(commit[0]) for error, commit in zip(errors, batch, strict=True)]

    def _follow(self, logits: Tensor, slot: Slot, tree: CandidateTree) -> Tensor:
        rows, before = logits.clone(), (*slot.token_ids, slot.pending)
        script: ScriptedText = self._scripts[slot]
        for node in range(ROOT, len(tree)):
            for token, weight in zip(script.wishes((*before, *tree.tokens_to(node))), WEIGHTS, strict=False):
                rows[node + 1, token] += weight
        return rows

    def _strayed(self, slot: Slot) -> Exception | None:
        lost = None if self._may_stray else self._scripts[slot].lost((*slot.token_ids, slot.pending))
        return None if lost is None else forbidden(lost)


class ScriptedTarget(Scripted, TargetModel):
    """A torch model that follows a script."""


class ScriptedModelEngine(Engine):
    """An engine that checks every prompt of a LangChain call against the call's input."""

    def submit(self, prompt_ids: Sequence[int], *args: Any, **kwargs: Any) -> Generation:
        """As `Engine.submit`. Raises AssertionError for a prompt that lacks part of its call's input."""
        LISTENER.check(self.tokenizer, prompt_ids)
        return super().submit(prompt_ids, *args, **kwargs)


def scripted_model_engine(
    script: Script,
    options: EngineOptions | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    draft_model: bool = False,
    may_stray: bool = False,
    name: str = "scripted-model",
    cost: CostCurve | None = None,
    on_result: ResultObserver | None = None,
    executor: Executor | None = None,
    **changes: Any,
) -> Engine:
    """An engine on a tiny random Llama that answers from `script`; the other arguments are those of `Engine`.

    With `draft_model`, a model with other random weights proposes as well, nearly always wrongly. An answer that a
    grammar forbids fails, unless it `may_stray`. Searches and writes finish before decoding goes on, and no step is
    timed, so the drafts depend neither on thread timing nor on the machine's load.
    """
    tokenizer = tokenizer or scripted_tokenizer()
    target = ScriptedTarget(_tiny(tokenizer, seed=0)).follow(tokenizer, script, may_stray=may_stray)
    options = (options or EngineOptions()).with_changes(**changes)
    if draft_model:
        options = options.with_changes(draft_model=_tiny(tokenizer, seed=1))
    return ScriptedModelEngine(
        target,
        tokenizer,
        options,
        name=name,
        cost=cost or fixed_cost(),
        on_result=on_result,
        executor=executor or AtOnce(),
    )


def fixed_cost() -> CostCurve:
    """A cost curve that is the same on every machine: it does not learn from measured steps."""
    return CostCurve.through(dict(MILLISECONDS))


@lru_cache(maxsize=1)
def scripted_tokenizer() -> PreTrainedTokenizerBase:
    """A byte tokenizer with ChatML control tokens, a template that takes tools, and a few hundred merged tokens."""
    from precedent.text.prompt import hermes_template

    tokenizer = byte_tokenizer(_merges([hermes_template(), *SAMPLES]))
    tokenizer.chat_template = hermes_template()
    return tokenizer


SAMPLES = (
    "The order was sent to the new address, and the refund is on its way. What else can I do for you today?",
    '<tool_call>\n{"name": "look_up", "arguments": {"number": "1042"}}\n</tool_call>',
    '{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", '
    '"properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]}}}',
)
"""Texts, besides the template, from which the merges are learned; merged tokens keep prompts short."""


def _merges(texts: Iterable[str], number: int = 400) -> tuple[tuple[str, str], ...]:
    """Learn byte-pair merges from a few texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=len(alphabet) + number, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    return tuple((left, right) for left, right in json.loads(learner.to_str())["model"]["merges"])


def _tiny(tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    return tiny_causal_lm(
        vocab_size=len(tokenizer), num_hidden_layers=2, seed=seed, max_position_embeddings=CONTEXT_LENGTH
    )
