"""A fake engine that answers from a script, for testing agents and front ends without a model."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from precedent.config import SamplingParams, SpeculationConfig
from precedent.decoding.sequence import Emission
from precedent.decoding.stats import TARGET, GenerationStats
from precedent.engine.generation import Generation, GenerationResult, cancelled_error
from precedent.errors import ContextOverflowError, GenerationError
from precedent.grammar import Grammar, GrammarConstraint, GuidanceEngine
from precedent.sampling.logprobs import TokenLogprob
from precedent.sampling.probabilities import largest_id
from precedent.text.assembly import TextAssembler
from precedent.text.templates import Template, Templates
from precedent_testing.overheard import LISTENER
from precedent_testing.scripted_conversation import Line, conversations
from precedent_testing.scripted_text import WEIGHTS, ScriptedText, forbidden

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from precedent.cache import Completion

Script = Callable[[str], str] | Sequence[str] | Sequence[Line]
"""A function from a prompt's text to its answer, a list of answers used in order, or the lines of a conversation."""


@dataclass(slots=True, kw_only=True)
class ScriptedRequest:
    """A request as the engine received it, for assertions; `ended` is set at its end, `cancelled` on cancellation."""

    prompt: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    speculation: SpeculationConfig | None = None
    tenant: str = "default"
    query: str = ""
    workflow_step: str = ""
    tools: str = ""
    prediction: str | Sequence[int] | None = None
    templates: Iterable[str | Template] = ()
    grammar: Grammar | None = None
    write_back: Callable[[Completion], object] | None = None
    shown_tokens: Collection[int] = ()
    prefix_tokens: int = 0
    generation: Generation = field(default_factory=Generation)
    ended: threading.Event = field(default_factory=threading.Event)
    cancelled: bool = False

    def __post_init__(self) -> None:
        self.templates = tuple(Templates(self.templates))


class ScriptedEngine:
    """Answers like `precedent.engine.Engine`, from a `script`, in bursts of 1 to `max_burst` tokens (random by `seed`).

    Tokens, text, stop strings, usage and cancellation go through the library's own code. Each request runs in its own
    thread and waits `pace` seconds before every burst. The prompt of a LangChain call is checked against the call's
    input. An answer that a grammar forbids fails; with `may_stray` it ends as soon as the grammar allows instead.
    """

    encodes_prompt = False

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        script: Script,
        *,
        seed: int = 0,
        max_burst: int = 5,
        may_stray: bool = False,
        pace: float = 0.0,
        context_length: int = 100_000,
        model_name: str = "scripted",
    ) -> None:
        self.tokenizer, self.model_name, self.context_length = tokenizer, model_name, context_length
        self.cache, self.kept_prefixes, self.drafters, self.closed = None, None, (), False
        self.speculation = SpeculationConfig()
        self.requests: list[ScriptedRequest] = []
        self.grammars: GuidanceEngine = GuidanceEngine(tokenizer, [int(tokenizer.eos_token_id)])
        self._answers, self._may_stray = answers_of(script), may_stray
        self._random, self._max_burst, self._pace = random.Random(seed), max_burst, pace

    def submit(self, prompt_ids: Sequence[int], sampling: SamplingParams, **asked: Any) -> Generation:
        """Start answering and return at once; the arguments are those of `Engine.submit`. Raises ContextOverflowError.

        Raises AssertionError for a prompt that lacks part of its LangChain call's input.
        """
        LISTENER.check(self.tokenizer, prompt_ids)
        if len(prompt_ids) >= self.context_length:
            raise ContextOverflowError(f"the prompt has {len(prompt_ids)} tokens, the context {self.context_length}")
        prompt = str(self.tokenizer.decode(list(prompt_ids)))
        request = ScriptedRequest(prompt=prompt, prompt_ids=tuple(prompt_ids), sampling=sampling, **asked)
        self.requests.append(request)
        rng = random.Random(self._random.random())
        threading.Thread(target=self._run, args=(request, rng), daemon=True).start()
        return request.generation

    def close(self) -> None:
        """Mark the engine closed; running requests end by themselves."""
        self.closed = True

    def _run(self, request: ScriptedRequest, rng: random.Random) -> None:
        try:
            request.generation.finish(self._answer(request, rng))
        except Exception as error:
            request.generation.fail(error)
        finally:
            request.ended.set()

    def _answer(self, request: ScriptedRequest, rng: random.Random) -> GenerationResult:
        """Emit the scripted answer burst by burst."""
        limit = request.sampling.max_tokens
        script = self._script_ids(request)
        assembler = TextAssembler(self.tokenizer, request.sampling.stop, request.shown_tokens)
        stats, given, shown, sources = GenerationStats(), list[int](), list[str](), list[str]()
        logprobs = list[TokenLogprob]()
        while len(given) < min(limit, len(script)) and not assembler.stopped:
            self._wait(request)
            burst = script[len(given) : min(limit, len(given) + rng.randint(1, self._max_burst))]
            text, kept = assembler.push(burst)
            given += burst[:kept]
            if assembler.stopped or len(given) >= min(limit, len(script)):
                text += assembler.flush()
            shown.append(text)
            _count(stats, kept)
            step_sources = ("recall",) * (kept - 1) + (TARGET,)
            sources += step_sources
            said = _certain(burst[:kept]) if request.sampling.logprobs is not None else ()
            logprobs += said
            request.generation.put(Emission(text, tuple(burst[:kept]), step_sources, said))
        ended = assembler.stopped or (bool(given) and given[-1] == self.tokenizer.eos_token_id)
        return GenerationResult(
            text="".join(shown),
            token_ids=tuple(given),
            sources=tuple(sources),
            finish_reason="stop" if ended else "length",
            prompt_tokens=len(request.prompt_ids),
            cached_prompt_tokens=min(3, len(request.prompt_ids)),
            stats=stats,
            logprobs=tuple(logprobs),
        )

    def _wait(self, request: ScriptedRequest) -> None:
        if self._pace:
            time.sleep(self._pace)
        if request.generation.cancelled:
            request.cancelled = True
            raise cancelled_error()

    def _script_ids(self, request: ScriptedRequest) -> list[int]:
        """The answer's tokens, end token included, following the script as far as the request's grammar allows."""
        end_id, answer = int(self.tokenizer.eos_token_id), self._answers(request.prompt)
        if request.grammar is None:
            return [*self.tokenizer.encode(answer, add_special_tokens=False), end_id]
        script = ScriptedText(self.tokenizer, 0, answer)
        shape = GrammarConstraint(self.grammars.matcher(request.grammar), [end_id])
        given = list[int]()
        while len(given) < request.sampling.max_tokens and end_id not in given:
            given.append(largest_id(shape(given, self._wished(script, given))))
            lost = None if self._may_stray else script.lost(given)
            if lost is not None:
                raise forbidden(lost)
        return given

    def _wished(self, script: ScriptedText, given: Sequence[int]) -> Tensor:
        row = torch.zeros(len(self.tokenizer))
        for token, weight in zip(script.wishes(given), WEIGHTS, strict=False):
            row[token] = weight
        return row


def answers_of(script: Script) -> Callable[[str], str]:
    """Convert a script to a function of the prompt's text; a list of answers is used in order.

    Raises ConfigError for an invalid line of a conversation.
    """
    if callable(script):
        return script
    if not all(isinstance(answer, str) for answer in script):
        return conversations(cast("Sequence[Line]", script))
    answers, remaining = script, iter(cast("Sequence[str]", script))

    def answer(prompt: str) -> str:
        try:
            return next(remaining)
        except StopIteration:
            raise GenerationError(f"the script's {len(answers)} answers are used up: add answers") from None

    return answer


def _certain(token_ids: Sequence[int]) -> tuple[TokenLogprob, ...]:
    return tuple(TokenLogprob(token, 0.0, ((token, 0.0),)) for token in token_ids)


def _count(stats: GenerationStats, kept: int) -> None:
    """Count one step as if all its tokens but the last had been proposed and accepted."""
    stats.num_steps += 1
    stats.num_drafts += 1
    stats.num_output_tokens += kept
    stats.num_draft_tokens += kept
    stats.num_accepted_tokens += max(kept - 1, 0)
    stats.accepted_by_source += Counter(recall=max(kept - 1, 0))
    stats.drafted_by_source += Counter(recall=kept)


def chatml_tokenizer(**settings: Any) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer with ChatML tokens and no merges: one token per byte, so any character can be split."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|im_end|>", pad_token="<|endoftext|>", **settings
    )
