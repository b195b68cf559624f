"""`generate`, the callable for `custom_generate=`, and its output."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from precedent.cache import Completion, prompt_fingerprint
from precedent.config import SamplingParams, SpeculationConfig
from precedent.decoding.loop import DecodeLoop
from precedent.decoding.sequence import DecodingSequence
from precedent.decoding.stats import GenerationStats
from precedent.drafters import Drafter, Request
from precedent.drafters.sessions import begin_all, end_all
from precedent.engine.checks import check_token_ids, unless_switched_off
from precedent.engine.delivery import WRITE_BACK
from precedent.errors import ConfigError
from precedent.runtime.process import computing
from precedent.runtime.team import fitted_team
from precedent.sampling.rng import entropy_rng
from precedent.target import Slot
from precedent_generate.prepared import Prepared, Speculators, fingerprint_of, prepared_for
from precedent_generate.processors import RowProcessors, RowStop, end_token_ids, with_penalties
from precedent_generate.refusals import check_call, dropped_by_generate, num_logits

if TYPE_CHECKING:
    from precedent.cache import SpeculationCache

QUERY_TOKENS = 200
"""Number of tokens at the prompt's end that form the recall query."""


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """The output of `generate(..., return_dict_in_generate=True)` with our loop.

    `speculation` holds one dictionary of counts per row, as in `response_metadata["speculation"]`. `past_key_values` is
    None, because our KV cache is not in transformers' format. After a row's end, `scores` and `logits` are 0.
    """

    speculation: tuple[dict[str, Any], ...] | None = None


@dataclass(slots=True, eq=False)
class _Row:
    """One row of the batch: its tokens without padding, its logits processors, and its stopping criteria."""

    prompt_ids: tuple[int, ...]
    processors: RowProcessors
    stop: RowStop
    sequence: DecodingSequence
    put: Callable[[Tensor], None] | None = None

    def take(self, token_ids: Sequence[int]) -> None:
        """Check the stopping criteria after every committed token, stream it, and cut the output where they stop."""
        if self.sequence.error is not None:
            raise self.sequence.error
        output = self.sequence.output_ids
        for length in range(len(output) - len(token_ids) + 1, len(output) + 1):
            kept = [self.processors.scores[place] for place in range(length)] if self.processors.scores else None
            stopped = self.stop(self.processors.ids(output[:length]), kept)
            if self.put is not None:
                self.put(torch.tensor(output[length - 1 : length]))
            if stopped:
                del output[length:]
                self.sequence.finish_reason = "stop"
                return


@dataclass(frozen=True, slots=True)
class _Speculation:
    """The drafters, the tenant and the cache of one call, and the prepared model that they draft for."""

    prepared: Prepared
    drafters: dict[str, Drafter]
    tenant: str
    cache: SpeculationCache | None
    tokenizer: Any
    write_back: bool

    def query(self, prompt_ids: tuple[int, ...]) -> str:
        """The recall query: the end of the prompt, as text."""
        if self.cache is None:
            return ""
        return str(self.tokenizer.decode(list(prompt_ids[-QUERY_TOKENS:]), skip_special_tokens=True))

    def begin(
        self,
        prompt_ids: tuple[int, ...],
        processors: RowProcessors,
        others: Sequence[_Row],
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
    ) -> _Row:
        """Begin the drafters, prefill, and build the sequence of one row."""
        prepared, width = self.prepared, processors.ids(()).shape[1]
        # coupled noise, not fresh random numbers: with the user's seed set again, the cache may hold what that seed
        # wrote
        seed = int(torch.randint(2**62, ()))
        request = Request(
            request_id=secrets.token_hex(8),
            prompt_ids=prompt_ids,
            sampling=SamplingParams(temperature=1.0, seed=seed) if config.do_sample else SamplingParams(),
            tenant=self.tenant,
            query=self.query(prompt_ids),
            mode="coupled" if config.do_sample else "greedy",
            shape=processors.unkept,
            end_token_ids=end_token_ids(criteria),
        )
        with prepared.lock:
            sequence = DecodingSequence(
                request=replace(request, shape=processors),
                slot=_prefilled(prompt_ids, others, prepared),
                max_tokens=(criteria.max_length or prepared.target.context_length) - width,
                rng_of=entropy_rng(seed),
                sessions=begin_all(self.drafters, request, prepared.fences),
                stats=GenerationStats(mode=request.mode),
            )
        return _Row(prompt_ids, processors, RowStop(criteria, processors.batch, len(others)), sequence)

    def store(self, rows: Sequence[_Row]) -> None:
        """Write finished answers back; a failure of the cache fails no answer."""
        if self.cache is None or not self.write_back:
            return
        for row in rows:
            output = row.sequence.output_ids
            completion = Completion(
                token_ids=tuple(output),
                tokenizer=fingerprint_of(self.tokenizer),
                model=self.prepared.fingerprint,
                tenant=self.tenant,
                query=self.query(row.prompt_ids),
                prompt_fingerprint=prompt_fingerprint(row.prompt_ids),
                text=str(self.tokenizer.decode(output, skip_special_tokens=True)),
            )
            self.prepared.fences.of(WRITE_BACK).run(partial(self.cache.insert, completion), 0)


@computing()
def generate(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    *,
    speculation_cache: SpeculationCache | None = None,
    speculation_tokenizer: Any = None,
    drafters: Speculators | None = None,
    tenant: str = "default",
    write_back: bool = True,
    frequency_penalty: float = 0.0,
    presence_penalty: float = 0.0,
    logit_bias: Mapping[int, float] | None = None,
    **model_inputs: Any,
) -> GenerateOutput | Tensor:
    """Decode speculatively in `model.generate(..., custom_generate=precedent.generate)`.

    The output distribution is that of plain `generate`. Logits processors, stopping criteria and the streamer stay in
    force. Candidates come from the prompt itself and, with a `speculation_cache` (and its `speculation_tokenizer`),
    from `tenant`'s earlier answers; finished answers are stored there. `drafters` selects other drafters, or none. Pass
    a stop string as a StopStringCriteria. `frequency_penalty`, `presence_penalty` and `logit_bias` are those of
    `SamplingParams`; transformers has none. The model's modules are not changed. The set-up made by the first call is
    kept for the model's lifetime. Raises UnsupportedError, by name, for what our loop cannot do, ConfigError or
    PromptError for bad input.

    >>> import torch
    >>> from precedent_testing.tiny_models import tiny_causal_lm
    >>> model, prompt = tiny_causal_lm(), torch.tensor([[5, 8, 13, 5, 8]])
    >>> plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    >>> ours = model.generate(
    ...     prompt,
    ...     attention_mask=torch.ones_like(prompt),
    ...     max_new_tokens=8,
    ...     do_sample=False,
    ...     custom_generate=generate,
    ... )
    >>> torch.equal(plain, ours)
    True
    """
    dropped = dropped_by_generate(model)
    check_call(model, input_ids, logits_processor, stopping_criteria, generation_config, model_inputs, dropped)
    penalties = SamplingParams(
        frequency_penalty=frequency_penalty, presence_penalty=presence_penalty, logit_bias=logit_bias or {}
    )
    check_token_ids(penalties, num_logits(model))
    processors = with_penalties(logits_processor, penalties, input_ids.shape[1])
    prepared = prepared_for(model)
    speculation = _speculation(prepared, drafters, speculation_cache, speculation_tokenizer, tenant, write_back)
    keep = bool(generation_config.return_dict_in_generate) and bool(
        generation_config.output_scores or generation_config.output_logits
    )
    rows: list[_Row] = []
    try:
        for prompt_ids in _unpadded(input_ids, model_inputs.get("attention_mask")):
            of_row = RowProcessors(processors, input_ids, len(rows), keep=keep)
            rows.append(speculation.begin(prompt_ids, of_row, rows, stopping_criteria, generation_config))
        if dropped.streamer is not None:
            rows[0].put = dropped.streamer.put
        _decode(rows, prepared)
    finally:
        for row in rows:
            end_all(row.sequence.sessions, prepared.fences)
    if dropped.streamer is not None:
        dropped.streamer.end()
    speculation.store(rows)
    return _output(rows, input_ids, generation_config)


def _speculation(
    prepared: Prepared,
    drafters: Speculators | None,
    cache: SpeculationCache | None,
    tokenizer: Any,
    tenant: str,
    write_back: bool,
) -> _Speculation:
    if cache is not None and tokenizer is None:
        raise ConfigError("speculation_cache= needs speculation_tokenizer=, the model's tokenizer (not tokenizer=)")
    if isinstance(drafters, str):
        raise ConfigError(f"drafters={drafters!r} is one name: give a list of names or drafters")
    allowed = unless_switched_off(SpeculationConfig(write_back=write_back))
    default = ("prompt",) if cache is None else ("recall", "prompt")
    wanted = (default if drafters is None else drafters) if allowed.enabled else ()
    fingerprint = "" if tokenizer is None else fingerprint_of(tokenizer)
    made = prepared.drafters(wanted, cache, fingerprint)
    return _Speculation(prepared, made, tenant, cache, tokenizer, allowed.write_back)


def _unpadded(input_ids: Tensor, mask: Tensor | None) -> list[tuple[int, ...]]:
    """Every row's token ids without its left padding."""
    if mask is None:
        return [tuple(row) for row in input_ids.tolist()]
    seen = mask.to(input_ids.device) != 0
    return [tuple(row[visible].tolist()) for row, visible in zip(input_ids, seen, strict=True)]


def _prefilled(prompt_ids: tuple[int, ...], others: Sequence[_Row], prepared: Prepared) -> Slot:
    """Create a slot that holds the prompt; a repeated prompt (`num_return_sequences`) is prefilled once."""
    same = next((row.sequence.slot for row in others if row.prompt_ids == prompt_ids), None)
    slot = prepared.target.new_slot() if same is None else prepared.target.fork(same, len(prompt_ids) - 1)
    prepared.target.prefill(slot, prompt_ids)
    return slot


def _decode(rows: Sequence[_Row], prepared: Prepared) -> None:
    """Step all rows together until each has stopped."""
    running, loop = list(rows), DecodeLoop(prepared.target, prepared.planner, prepared.fences)
    while running:
        with prepared.lock, fitted_team(prepared.target.runner.team):
            results = loop.step([row.sequence for row in running])
        for row, result in zip(running, results, strict=True):
            row.take(result.token_ids)
        running = [row for row in running if not row.sequence.finished]


def _output(rows: Sequence[_Row], input_ids: Tensor, config: GenerationConfig) -> GenerateOutput | Tensor:
    """Prompts and answers `[rows, longest]`, padded on the right; a `GenerateOutput` with `return_dict_in_generate`."""
    longest = max(len(row.sequence.output_ids) for row in rows)
    padding = 0 if config._pad_token_tensor is None else int(config._pad_token_tensor)
    answers = [[*row.sequence.output_ids, *[padding] * (longest - len(row.sequence.output_ids))] for row in rows]
    sequences = torch.cat((input_ids, torch.tensor(answers, dtype=input_ids.dtype, device=input_ids.device)), dim=1)
    if not config.return_dict_in_generate:
        return sequences
    return GenerateOutput(
        sequences=sequences,  # type: ignore[arg-type]  # transformers annotates a legacy tensor type
        scores=_stacked([row.processors.scores for row in rows], longest) if config.output_scores else None,
        logits=_stacked([row.processors.raw for row in rows], longest) if config.output_logits else None,
        speculation=tuple(row.sequence.stats.as_dict() for row in rows),
    )


def _stacked(kept: Sequence[dict[int, Tensor]], longest: int) -> tuple[Any, ...]:
    """One tensor `[rows, vocab_size]` per token."""
    nothing = torch.zeros_like(kept[0][0])
    return tuple(torch.stack([rows.get(place, nothing) for rows in kept]) for place in range(longest))
