"""Agent runs once more, and what they come to, as whoever owns the agent tells it: a judge learns what changes it.

A rerun stands below the agent's chat model, in place of the engine, and knows answers by their prompts. What was
answered before is replayed, one answer may get another token, the rest is decoded. So a turn that comes out as it was
recorded costs nothing, and neither does all that follows it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from precedent.config import SamplingParams
from precedent.decoding.sequence import Emission
from precedent.decoding.stats import TARGET
from precedent.engine.generation import Generation, GenerationResult
from precedent.errors import ConfigError, PromptError, UnsupportedError
from precedent.text.assembly import TextAssembler
from precedent.text.end_tokens import end_token_ids
from precedent.text.traces import Trajectory

if TYPE_CHECKING:
    from precedent.engine.engine import Engine
    from precedent.grammar import Grammar

TokenIds = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the target: the prompt and the answer's tokens, the end token among them."""

    prompt_ids: TokenIds
    answer_ids: TokenIds


@dataclass(frozen=True, slots=True)
class Replaced:
    """A change to a recorded run: the answer to `prompt_ids` begins with `answer_ids`, and the target goes on."""

    prompt_ids: TokenIds
    answer_ids: TokenIds


@dataclass(slots=True)
class _Rerun:
    """One run in progress: what is changed, the recorded turns, and the turns so far."""

    recorded: tuple[Turn, ...] = ()
    replaced: Replaced | None = None
    turns: list[Turn] = field(default_factory=list)


class RerunEngine:
    """Answers a chat model in place of `engine`, greedily, one run at a time.

    Within a run, greedy answers are a function of the prompt, so each prompt is decoded once however often the run is
    repeated. Raises UnsupportedError for requests whose answers are no such function, or cannot be continued.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._ends = end_token_ids(engine.target.model, engine.tokenizer)
        self._known: dict[TokenIds, TokenIds] = {}
        self._rerun = _Rerun()
        self.num_decoded = 0
        """Tokens decoded so far."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    @contextmanager
    def recording(self) -> Iterator[list[Turn]]:
        """A new run: nothing is known; yields the turns, in order, as they are answered."""
        self._known, self._rerun = {}, _Rerun()
        yield self._rerun.turns

    @contextmanager
    def repeating(self, recorded: Sequence[Turn], replaced: Replaced | None = None) -> Iterator[None]:
        """The run `recorded` once more, with one answer replaced.

        Raises PromptError at its end if the prompt of the replaced answer did not occur, or if, without a replacement,
        any prompt was another one: such a run is not repeatable.
        """
        self._known |= {turn.prompt_ids: turn.answer_ids for turn in recorded}
        self._rerun = _Rerun(tuple(recorded), replaced)
        yield
        wanted = {turn.prompt_ids for turn in recorded} if replaced is None else {replaced.prompt_ids}
        if not wanted <= {turn.prompt_ids for turn in self._rerun.turns}:
            raise PromptError(
                "the run is not repeatable: the same answers led to another prompt than before; let it begin each time "
                "with tools in the same state, and without times or random numbers in its messages"
            )

    def submit(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        grammar: Grammar | None = None,
        shown_tokens: Collection[int] = (),
        **others: Any,
    ) -> Generation:
        """As `Engine.submit`, but the answer is complete when this returns."""
        _check(sampling, grammar)
        prompt = tuple(int(token) for token in prompt_ids)
        answer = self._answer(prompt, sampling, others)
        self._rerun.turns.append(Turn(prompt, answer))
        said, stopped = _said(answer, TextAssembler(self._engine.tokenizer, sampling.stop, shown_tokens))
        ended = stopped or not self._ends_of(sampling).isdisjoint(answer[-1:])
        return _finished(said, "stop" if ended else "length", len(prompt))

    def _answer(self, prompt: TokenIds, sampling: SamplingParams, others: Mapping[str, Any]) -> TokenIds:
        replaced = self._rerun.replaced
        if replaced is not None and prompt == replaced.prompt_ids:
            return self._continued(prompt, replaced.answer_ids, sampling, others)
        if prompt not in self._known:
            self._known[prompt] = self._continued(prompt, (), sampling, others)
        return self._known[prompt]

    def _continued(
        self, prompt: TokenIds, answer: TokenIds, sampling: SamplingParams, others: Mapping[str, Any]
    ) -> TokenIds:
        """`answer`, and what the target says after it; what was recorded at this turn is proposed to it."""
        room = sampling.max_tokens - len(answer)
        if room < 1 or (answer and answer[-1] in self._ends_of(sampling)):
            return answer
        turn, recorded = len(self._rerun.turns), self._rerun.recorded
        known = {"prediction": recorded[turn].answer_ids} if turn < len(recorded) else {}
        asked = replace(sampling, max_tokens=room)
        result = self._engine.submit((*prompt, *answer), asked, **{**others, **known}).result()
        self.num_decoded += len(result.token_ids)
        return (*answer, *result.token_ids)

    def _ends_of(self, sampling: SamplingParams) -> frozenset[int]:
        return self._ends | set(sampling.stop_token_ids)


def _check(sampling: SamplingParams, grammar: Grammar | None) -> None:
    """Raise UnsupportedError unless an answer depends on its prompt and its own tokens alone, token by token."""
    if not sampling.greedy:
        raise UnsupportedError(
            f"runs are repeated greedily: leave temperature={sampling.temperature} out of the agent's calls"
        )
    if grammar is not None:
        raise UnsupportedError("answers that a grammar holds (forced calls, response formats) cannot be continued here")
    plain = SamplingParams(temperature=0.0)
    shaped = ("frequency_penalty", "presence_penalty", "repetition_penalty", "logit_bias")
    used = [name for name in shaped if getattr(sampling, name) != getattr(plain, name)]
    if used:
        raise UnsupportedError(f"{', '.join(used)} would count anew in a continued answer: leave it out")


def _said(answer: TokenIds, assembler: TextAssembler) -> tuple[Emission, bool]:
    """The text of an answer and those of its tokens that count, and whether a stop string ended it."""
    text, kept = assembler.push(answer)
    text += assembler.flush()
    return Emission(text, answer[:kept], (TARGET,) * kept), assembler.stopped


def _finished(said: Emission, finish_reason: str, prompt_tokens: int) -> Generation:
    generation = Generation()
    generation.put(said)
    generation.finish(GenerationResult(said.text, said.token_ids, said.sources, finish_reason, prompt_tokens, 0))
    return generation


# Outcomes

GROUP = "precedent.outcomes"
"""Entry points: factories without arguments that return an `Outcome`."""

TEXT = "text"

Outcome = Callable[[Trajectory, Any], object]
"""`(run, chat_model) -> outcome`: runs the recorded agent run once more on a LangChain chat model.

It must be repeatable: the same answers of the chat model must lead to the same prompts, and to an equal outcome. So it
begins each time with tools in the same state. Outcomes are compared by `==`; None says that the run failed, and runs
that fail without a draft are left out. An error that an answer may cause is part of the outcome: catch it and return
it; what is raised ends the training.
"""


def load_outcome(name: str) -> Outcome:
    """The outcome called `name`: `text`, an installed one, or `module:factory`.

    Raises ConfigError, naming those that are installed, if there is none.
    """
    if name == TEXT:
        return last_lines
    found = next(iter(entry_points(group=GROUP, name=name)), None)
    if found is not None:
        return _made(name, found.load)
    if ":" in name:
        module, _, attribute = name.partition(":")
        return _made(name, lambda: getattr(importlib.import_module(module), attribute))
    known = ", ".join(sorted({TEXT, *(entry.name for entry in entry_points(group=GROUP))}))
    raise ConfigError(f"no outcome is called {name!r} (installed: {known}); or write module:factory")


def _made(name: str, load: Callable[[], Callable[[], Outcome]]) -> Outcome:
    try:
        return load()()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the outcome {name!r} cannot be loaded: {error}") from error


def last_lines(run: Trajectory, chat_model: Any) -> object:
    """The outcome of runs without tools to run: the last line of the answer at every recorded turn.

    Words before an answer's last line may change, letter case and spaces may change anywhere.
    """
    bound = chat_model.bind_tools(list(run.tools)) if run.tools else chat_model
    return tuple(_last_line(bound.invoke(list(messages)).text) for messages in prompts_of(run))


def prompts_of(run: Trajectory) -> list[tuple[dict[str, Any], ...]]:
    """The messages before each answer of a run; only before the last one if the run is a single call."""
    places = [place for place, message in enumerate(run.messages) if message["role"] == "assistant" and place]
    return [run.messages[:place] for place in (places[-1:] if run.only_last else places)]


def _last_line(text: str) -> str:
    lines = [" ".join(line.split()).lower() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
