"""Measures a draft with a target: how much is accepted, what drafting costs, and the resulting speed.

Acceptance at a position is `sum(min(target_probs, draft_probs))`, one minus the total variation between the two
distributions: the probability that a sample there is accepted. The positions are those of the target's own answers to
held-out prompts. Speeds assume that a wider step costs no more than a step of one token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from precedent.config import SamplingParams, SpeculationConfig
from precedent.drafters.base import Candidates
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.drafters.request import Request
from precedent.sampling.probabilities import probs_of
from precedent.sampling.rng import CounterRng
from precedent.target import Slot, TargetModel
from precedent.target.load.first_layers import exits_early
from precedent.tree import EMPTY_TREE, ROOT, TreeBuilder, chain
from precedent_drafts.block_draft import BlockDraft
from precedent_drafts.block_drafter import BlockDrafter, BlockModel, BlockSession, Filled
from precedent_drafts.heads import HeadDrafter, HeadModel, reading_hidden_states
from precedent_drafts.trained import reads_hidden_states
from precedent_drafts.training.lessons import Text

ROWS_AT_ONCE = 128
"""Number of full-vocabulary rows compared at a time."""

MOST_DRAWS = SpeculationConfig().max_draws
"""Largest number of samples per step considered in the search for the best one."""

TIMED_PREFIX, TIMED_ROUNDS = 256, 12
"""Length of the prefix for timed steps, in tokens, and number of alternating timings."""

NODES = 16
"""Nodes of a block draft's trees that are compared with the target's text."""

Floats = NDArray[np.float64]
Agreed = NDArray[np.bool_]
Done = Callable[[int, int], None]


Report = dict[str, Any]
"""How well a draft serves a target, ready for JSON.

A step of the target takes `target_milliseconds`; `cost` is a draw's or a forward's share of it. `tokens_per_step` are
expected, and decoding is `speed` times as fast as plain decoding.

Of a draft model `acceptance` is the mean of one minus total variation at `temperature`, `agreement` the share of
positions where both models have the same likeliest token; `acceptance_by_draw` is that of the first sample of a step,
of the second behind the true token, and so on, for a draft that reads its own hidden states there; for others it is one
number, since all samples have the same. A sample takes `draw_milliseconds` (forward pass, distribution and choice).
With `best_draws` samples per step decoding is fastest.

Of a block draft, for a tree of `nodes` per step, `acceptance` `[block_size]` is the mean by position, given the true
tokens before it. A forward takes `forward_milliseconds`, candidates included.
"""


class Measurement:
    """Measures drafts, one after the other, on the same texts of a target."""

    def __init__(self, target: PreTrainedModel, texts: Sequence[Text], temperature: float = 1.0) -> None:
        self._model, self._texts, self._sampling = target, texts, SamplingParams(temperature)

    def report(self, name: str, draft: PreTrainedModel, done: Done = lambda *_: None) -> Report:
        """Compare a draft with the target on every text, and time both."""
        target = TargetModel(self._model)  # another one each time: some drafts let it keep hidden states
        if isinstance(draft, BlockDraft):
            return self._of_block(name, target, BlockModel(draft, target), done)
        if reads_hidden_states(draft):
            return self._of_chain(name, target, reading_hidden_states(draft, target, feeds_back_normed=True), done)
        return self._of_chain(name, target, TargetModel(draft), done)

    def _of_chain(self, name: str, target: TargetModel, draft: TargetModel, done: Done) -> Report:
        reads = isinstance(draft, HeadModel)
        acceptances, agreements = list[Floats](), list[Agreed]()
        for number, text in enumerate(self._texts):
            done(number, len(self._texts))
            compared = compared_by_draw if reads else _compared
            accepted, agreed = compared(target, draft, text, self._sampling)  # type: ignore[arg-type]  # by its class
            acceptances.append(accepted)
            agreements.append(agreed)
        slot, request = self._begun(target, self._timed_prompt())
        drafter = HeadDrafter("draft-model", draft) if isinstance(draft, HeadModel) else DraftModelDrafter(
            draft, early_exit=exits_early(draft, target)
        )  # fmt: skip
        session = drafter.begin(request)
        session.draw(TreeBuilder(), 1, CounterRng(0, 0))  # prefills the prompt
        drawn, step = self._timed(
            target, slot, lambda number: session.draw(TreeBuilder(), MOST_DRAWS, CounterRng(0, number))
        )
        draw = drawn / MOST_DRAWS
        expected = expected_tokens(acceptances, MOST_DRAWS)
        speeds = [tokens / (1 + number * draw / step) for number, tokens in enumerate(expected)]
        best, by_draw = int(np.argmax(speeds)), np.atleast_1d(np.nanmean(np.concatenate(acceptances), axis=0)).tolist()
        return self._common(name, sum(map(len, acceptances)), draw, step) | {
            "acceptance": by_draw[0], "acceptance_by_draw": by_draw,
            "agreement": float(np.concatenate(agreements).mean()), "draw_milliseconds": draw, "best_draws": best,
            "tokens_per_step": expected[best], "speed": speeds[best],
        }  # fmt: skip

    def _of_block(self, name: str, target: TargetModel, model: BlockModel, done: Done) -> Report:
        sums, counts = torch.zeros(2, model.settings.block_size, dtype=torch.float64)
        matched = 0
        for number, text in enumerate(self._texts):
            done(number, len(self._texts))
            matched += self._walk(target, model, text, sums, counts)
        slot, session = self._session(target, model, self._timed_prompt())
        session.match(NODES)  # reads the prompt
        forward, step = self._timed(target, slot, lambda _: session.match(NODES))
        tokens = 1.0 + matched / int(counts[0])
        return self._common(name, int(counts[0]), forward, step) | {
            "acceptance": (sums / counts.clamp(min=1.0)).tolist(), "forward_milliseconds": forward, "nodes": NODES,
            "tokens_per_step": tokens, "speed": tokens / (1.0 + forward / step),
        }  # fmt: skip

    def _common(self, name: str, positions: int, milliseconds: float, step: float) -> Report:
        """What every report says, given the milliseconds of drafting and of a step of the target."""
        return {
            "draft": name, "positions": positions, "prompts": len(self._texts),
            "temperature": self._sampling.temperature, "target_milliseconds": step, "cost": milliseconds / step,
        }  # fmt: skip

    @torch.inference_mode()
    def _walk(self, target: TargetModel, model: BlockModel, text: Text, sums: Tensor, counts: Tensor) -> int:
        """Fill a block before every token of an answer; adds acceptances, and returns how many tokens trees held."""
        prompt, answer = text.token_ids[: text.num_context_tokens], text.token_ids[text.num_context_tokens :]
        (slot, session), rows, blocks = self._session(target, model, prompt), list[Tensor](), list[Filled]()
        matched = 0
        for place, token in enumerate(answer):
            block, candidates = session.filled(NODES)
            blocks.append(block)
            matched += matched_tokens(candidates, answer[place:])
            rows.append(probs_of(target.plain_step(slot)[0], self._sampling).cpu()[model.token_ids])
            target.commit(slot, EMPTY_TREE, (), token)
            session.committed([token])
        for place, block in enumerate(blocks):
            for depth in range(min(len(block.confidence), len(rows) - place)):
                before = text.token_ids[text.num_context_tokens + place + depth - 1]
                logits = (block.logits[depth] + model.links(before)).cpu()
                sums[depth] += torch.minimum(probs_of(logits, self._sampling), rows[place + depth]).sum()
                counts[depth] += 1
        return matched

    def _session(self, target: TargetModel, model: BlockModel, prompt: Sequence[int]) -> tuple[Slot, BlockSession]:
        slot, request = self._begun(target, prompt)
        return slot, BlockSession(BlockDrafter(model), request, model.place_beside(lambda: slot, len(prompt)))

    def _begun(self, target: TargetModel, prompt: Sequence[int]) -> tuple[Slot, Request]:
        slot = target.new_slot()
        target.prefill(slot, prompt)
        return slot, Request("measured", tuple(prompt), self._sampling, mode="traversal", target_slot=lambda: slot)

    def _timed_prompt(self) -> list[int]:
        token_ids = self._texts[0].token_ids
        return [*token_ids, *([token_ids[-1]] * TIMED_PREFIX)][:TIMED_PREFIX]

    def _timed(self, target: TargetModel, slot: Slot, draft: Callable[[int], object]) -> tuple[float, float]:
        """Milliseconds of drafting and of a plain step; medians of alternating runs."""
        drafts, steps = [], []
        for number in range(TIMED_ROUNDS):
            started = perf_counter()
            draft(number)
            between = perf_counter()
            probs_of(target.plain_step(slot)[0], self._sampling)
            target.discard(slot)
            drafts.append(between - started)
            steps.append(perf_counter() - between)
        return median(drafts) * 1e3, median(steps) * 1e3


@torch.inference_mode()
def _compared(target: TargetModel, draft: TargetModel, text: Text, sampling: SamplingParams) -> tuple[Floats, Agreed]:
    """Acceptance and agreement at every position of an answer, `[num_answer_tokens]` each."""
    accepted, agreed = [], []
    for rows in zip(_answer_logits(target, text), _answer_logits(draft, text), strict=True):
        accepted.append(torch.minimum(*(probs_of(each, sampling) for each in rows)).sum(-1).double().cpu())
        agreed.append((rows[0].argmax(-1) == rows[1].argmax(-1)).cpu())
    return torch.cat(accepted).numpy(), torch.cat(agreed).numpy()


def _answer_logits(model: TargetModel, text: Text) -> Iterator[Tensor]:
    """Logits before each token of an answer, `[rows, vocab_size]`, some rows at a time."""
    slot, rest = model.new_slot(), text.token_ids[text.num_context_tokens :]
    model.prefill(slot, text.token_ids[: text.num_context_tokens])
    while rest:
        piece, rest = rest[:ROWS_AT_ONCE], rest[ROWS_AT_ONCE:]
        tree = chain(piece[:-1])
        yield model.score([(slot, tree)])[0]
        model.commit(slot, tree, range(len(tree)), piece[-1])


@torch.inference_mode()
def compared_by_draw(
    target: TargetModel, head: HeadModel, text: Text, sampling: SamplingParams
) -> tuple[Floats, Agreed]:
    """Acceptance of each sample behind every position of an answer, and whether the first one's likeliest token agrees.

    The first is `[num_answer_tokens, MOST_DRAWS]`, NaN beyond the end of the answer: the draft is given the true tokens
    before a sample, and reads its own hidden states of all but the first.
    """
    prompt, answer = text.token_ids[: text.num_context_tokens], text.token_ids[text.num_context_tokens :]
    slot, drafted = target.new_slot(), head.new_slot()
    head.bind(drafted, lambda: slot)
    target.prefill(slot, prompt)
    head.prefill(drafted, prompt[1:])
    rows, chains = list[Tensor](), list[list[Tensor]]()
    for place, token in enumerate(answer):
        chains.append([])
        for given in answer[place : place + MOST_DRAWS]:
            chains[-1].append(head.plain_step(drafted)[0])
            head.commit(drafted, EMPTY_TREE, (), given)
        head.rewind(drafted, len(prompt) + place - 1)  # entries of the text's tokens but the first
        rows.append(target.plain_step(slot)[0])
        target.commit(slot, EMPTY_TREE, (), token)
        drafted.pending = token
    probs = [probs_of(row, sampling) for row in rows]
    accepted = np.full((len(answer), MOST_DRAWS), np.nan)
    for place, drawn in enumerate(chains):
        for draw, row in enumerate(drawn):
            accepted[place, draw] = float(torch.minimum(probs_of(row, sampling), probs[place + draw]).sum())
    agreed = [int(row.argmax()) == int(drawn[0].argmax()) for row, drawn in zip(rows, chains, strict=True)]
    return accepted, np.array(agreed)


def expected_tokens(acceptances: Sequence[Floats], most_draws: int) -> list[float]:
    """Expected tokens of a step with 0, 1, … samples: the target's own token and the accepted prefix of the samples.

    `acceptances` holds those at successive positions of each text, `[positions]`, or, where they depend on the samples
    before, those of all samples behind each position, `[positions, most_draws]`, NaN beyond the text's end. The mean is
    over all positions at which a chain of `most_draws` samples could begin (only the first one in shorter texts).
    """
    expected = [1.0]
    for number in range(1, most_draws + 1):
        chains = [_chains(each, number, most_draws).prod(-1) for each in acceptances if len(each) >= number]
        expected.append(expected[-1] + float(np.concatenate(chains).mean() if chains else 0.0))
    return expected


def _chains(values: Floats, length: int, longest: int) -> Floats:
    """The acceptances of the first `length` samples of each chain, `[chains, length]`."""
    starts = max(1, len(values) - longest + 1)
    if values.ndim == 1:
        return np.lib.stride_tricks.sliding_window_view(values, length)[:starts]
    return values[:starts, :length]


def matched_tokens(candidates: Candidates, answer: Sequence[int]) -> int:
    """How many tokens of the answer the candidates hold as a path from the root."""
    below = {pair: node for node, pair in enumerate(zip(candidates.parents, candidates.token_ids, strict=True))}
    node, count = ROOT, 0
    for token in answer:
        if (node, token) not in below:
            break
        node, count = below[node, token], count + 1
    return count
