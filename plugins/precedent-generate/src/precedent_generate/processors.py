"""Applies `generate`'s logits processors per tree node and its stopping criteria per committed token.

Both get the token ids of one row (prompt, answer, and a node's own path), as from `generate` itself at that position.
Processors must be functions of (input_ids, scores), because a tree also needs rows for nodes that are never reached.
transformers' own stateful processors are refused by class, a user's by calling it twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process, stopping_criteria
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from precedent.config import SamplingParams
from precedent.errors import UnsupportedError
from precedent.sampling.constraints import constraints_for
from precedent.sampling.row_shaper import RowShaper
from precedent_generate.twin import plain_attributes

ROWS_ALIKE = (
    "MinLengthLogitsProcessor",
    "MinNewTokensLengthLogitsProcessor",
    "TemperatureLogitsWarper",
    "TopPLogitsWarper",
    "TopKLogitsWarper",
    "TopHLogitsWarper",
    "MinPLogitsWarper",
    "TypicalLogitsWarper",
    "EpsilonLogitsWarper",
    "EtaLogitsWarper",
    "NoRepeatNGramLogitsProcessor",
    "SequenceBiasLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "ForcedEOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "ExponentialDecayLengthPenalty",
    "LogitNormalization",
    "SuppressTokensAtBeginLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "WatermarkLogitsProcessor",
)
"""Processors of transformers that treat every row of a batch alike; they are called with a single row."""

ROWS_APART = (
    "RepetitionPenaltyLogitsProcessor",
    "EncoderRepetitionPenaltyLogitsProcessor",
    "EncoderNoRepeatNGramLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
)
"""Processors of transformers that depend on the row's place in the batch, as a user's may; they get a full batch."""

CRITERIA = ("MaxLengthCriteria", "MaxTimeCriteria", "StopStringCriteria", "EosTokenCriteria")
"""Stopping criteria of transformers that look at a single row."""


class RowProcessors:
    """Applies `generate`'s processors to one row of its batch; this is the `shape` of our decode loop.

    It computes in float32, like `generate`, whatever the model's dtype. With `keep`, `raw` and `scores` hold the logits
    `[vocab_size]` at every position of the output, before and after the processors.
    """

    def __init__(self, processors: LogitsProcessorList, prompts: Tensor, row: int, *, keep: bool = False) -> None:
        self._prompt, self.batch, self._row, self._keep = prompts[row : row + 1], len(prompts), row, keep
        self._processors: list[tuple[Any, bool]] = [
            (LogitsProcessorList([one]), _is_one_of(one, ROWS_ALIKE)) for one in processors
        ]
        self.raw: dict[int, Tensor] = {}
        self.scores: dict[int, Tensor] = {}

    def __call__(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """The processed row after `output_ids`, `[vocab_size]`."""
        scores = row.to(self._prompt.device, torch.float32, copy=True)[None]
        if self._keep:
            self.raw[len(output_ids)] = scores[0].clone()
        if self._processors:
            scores = self._processed(self.ids(output_ids), scores)
        if self._keep:
            self.scores[len(output_ids)] = scores[0]
        return scores[0]

    def unkept(self, output_ids: Sequence[int], row: Tensor) -> Tensor:
        """Process a drafter's row, without keeping it."""
        scores = row.to(self._prompt.device, torch.float32, copy=True)[None]
        return self._processed(self.ids(output_ids), scores)[0]

    def ids(self, output_ids: Sequence[int]) -> Tensor:
        """The prompt as given to `generate` (padding included) and the output, `[1, length]`."""
        output = torch.tensor([output_ids], dtype=self._prompt.dtype, device=self._prompt.device)
        return torch.cat((self._prompt, output), dim=1)

    def _processed(self, ids: Tensor, scores: Tensor) -> Tensor:
        for processor, rows_alike in self._processors:
            if rows_alike or self.batch == 1:
                scores = processor(ids, scores)
            else:  # repeat this row over the whole batch; only the result at its own place counts
                answers = processor(ids.repeat(self.batch, 1), scores.repeat(self.batch, 1))
                scores = answers[self._row : self._row + 1]
        return scores


class Penalties(LogitsProcessor):
    """Our biases and penalties as a logits processor; `width` is where the answer begins in `input_ids`."""

    def __init__(self, shape: RowShaper, width: int) -> None:
        self._shape, self._width = shape, width

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Shape each row by its own answer, `[batch, vocab_size]`."""
        answers = input_ids[:, self._width :].tolist()
        return torch.stack([self._shape(answer, row) for answer, row in zip(answers, scores, strict=True)])


def with_penalties(processors: LogitsProcessorList, params: SamplingParams, width: int) -> LogitsProcessorList:
    """Insert biases and penalties where `generate` puts a user's processors: before temperature and truncation."""
    shape = constraints_for(params, ())
    if shape is None:
        return processors
    warpers = (place for place, one in enumerate(processors) if type(one).__name__.endswith("Warper"))
    place = next(warpers, len(processors))
    return LogitsProcessorList([*processors[:place], Penalties(shape, width), *processors[place:]])


class RowStop:
    """Whether `generate` would stop one row of its batch after a token."""

    def __init__(self, criteria: StoppingCriteriaList, batch: int, row: int) -> None:
        self._batch, self._row = batch, row
        self._alone = StoppingCriteriaList(one for one in criteria if batch == 1 or _is_one_of(one, CRITERIA))
        self._others = StoppingCriteriaList(one for one in criteria if one not in self._alone)

    def __call__(self, ids: Tensor, scores: Sequence[Tensor] | None) -> bool:
        """Check `ids` `[1, length]` and, if they are kept, the processed rows `[vocab_size]` of the output."""
        kept = None if scores is None else tuple(row[None] for row in scores)
        if len(self._alone) and bool(self._alone(ids, kept)[0]):
            return True
        if not self._others:
            return False
        kept = None if kept is None else tuple(row.repeat(self._batch, 1) for row in kept)
        return bool(self._others(ids.repeat(self._batch, 1), kept)[self._row])


def check_processors(processors: LogitsProcessorList, prompts: Tensor, vocab_size: int) -> None:
    """Raise UnsupportedError, naming the processor, if one is not a function of (input_ids, scores)."""
    for processor in processors:
        if _is_one_of(processor, (*ROWS_ALIKE, *ROWS_APART)):
            continue
        name = type(processor).__name__
        if type(processor).__module__.startswith("transformers."):
            raise UnsupportedError(
                f"{name} keeps state or runs a model, so it cannot be applied to the nodes of a candidate tree: leave "
                "out the setting that adds it, or call generate without custom_generate"
            )
        _ask_twice(processor, name, prompts, vocab_size)


def _ask_twice(processor: Any, name: str, prompts: Tensor, vocab_size: int) -> None:
    """Two equal calls must give equal results, and the second must leave no trace (lazy set-up is done by then)."""
    refusal = UnsupportedError(
        f"{name} gives different results for the same input, or changes its state on every call: "
        "custom_generate=precedent.generate needs logits processors that are functions of (input_ids, scores)"
    )
    scores = torch.zeros((len(prompts), vocab_size), device=prompts.device)
    asked: Any = LogitsProcessorList([processor])
    first, before = asked(prompts.clone(), scores.clone()), plain_attributes(processor)
    try:
        second = asked(prompts.clone(), scores.clone())
    except Exception as error:
        raise refusal from error
    if not torch.equal(first, second) or plain_attributes(processor) != before:
        raise refusal


def check_criteria(criteria: StoppingCriteriaList) -> None:
    """Raise UnsupportedError, naming the criterion, for one of transformers' criteria for assisted generation."""
    for one in criteria:
        if type(one).__module__.startswith("transformers.") and not _is_one_of(one, CRITERIA):
            raise UnsupportedError(f"{type(one).__name__} belongs to assisted generation: leave it out")


def end_token_ids(criteria: StoppingCriteriaList) -> frozenset[int]:
    """The end tokens of all criteria that have any."""
    ids = (getattr(one, "eos_token_id", None) for one in criteria)
    return frozenset(int(token) for some in ids if some is not None for token in torch.as_tensor(some).flatten())


def _is_one_of(one: object, names: Sequence[str]) -> bool:
    """Whether `one` is exactly of one of these transformers classes; a subclass may do anything."""
    homes = (logits_process, stopping_criteria)
    return any(type(one) is getattr(home, name, None) for home in homes for name in names)
