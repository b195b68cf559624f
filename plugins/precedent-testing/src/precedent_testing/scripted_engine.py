r"""A fake engine that answers from a script, for testing agents and front ends without a model.

A script is a function of the prompt, a list of answers, or a conversation, whose answers are given only to a prompt
that holds everything before them:

    [
        ("user", "Where is order 7?"),
        ("assistant", '<tool_call>\n{"name": "look_up", "arguments": {"number": "7"}}\n</tool_call>'),
        ("tool", "order 7 is open"),
        ("assistant", "It is open."),
    ]
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers.convert_slow_tokenizer import bytes_to_unicode

from precedent.config import PromptScores, SamplingParams, SpeculationConfig
from precedent.decoding.sequence import Emission
from precedent.decoding.stats import TARGET, GenerationStats
from precedent.engine.generation import Generation, GenerationResult, cancelled_error
from precedent.errors import ConfigError, ContextOverflowError, GenerationError
from precedent.grammar import Grammar, GrammarConstraint, GuidanceEngine
from precedent.sampling.logprobs import TokenLogprob
from precedent.sampling.probabilities import largest_id
from precedent.text.assembly import TextAssembler
from precedent.text.templates import Template, Templates
from precedent_testing.overheard import BEGIN, LISTENER, Said, Turn, missing, turns_of
from precedent_testing.tiny_models import byte_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from precedent.cache import Completion

Line = tuple[str, str]
"""The role ("system", "user", "assistant" or "tool") and the text; an assistant's calls are in the model's format."""

ROLES = ("system", "user", "assistant", "tool")

Script = Callable[[str], str] | Sequence[str] | Sequence[Line]
"""A function from a prompt's text to its answer, a list of answers used in order, or the lines of a conversation."""


BLANK = b" \t\r\n"
SPACES = (b" ", b"\n")
"""White space that may be added, once per place, if a constraint requires some."""

PUNCTUATION = b"{}[],:<>"
_GAP = re.compile(rb"(?<![ \t\r\n])[ \t\r\n]*")
_STRING = re.compile(rb'"(?:\\.|[^"\\])*(?:"|$)', re.DOTALL)

CLOSERS = (b'"', b"}", b"]")
"""The bytes that end JSON soonest, best first."""

WEIGHTS = tuple(50.0 * 2.5**rank for rank in reversed(range(9)))
"""Added to the logits of a script's wishes, first wish first; so far apart that no penalty changes their order."""


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
    scores: PromptScores | None = None
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
            raise ContextOverflowError(
                f"the prompt is too long: {len(prompt_ids)} tokens, the context {self.context_length}"
            )
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


def conversations(*scripts: Sequence[Line]) -> Callable[[str], str]:
    """A script of several conversations: a prompt is answered by the first one that it follows.

    The script raises GenerationError for a prompt that follows none, and says what is missing for each. Raises
    ConfigError for a script that is not a conversation.
    """
    for script in scripts:
        _check(script)

    def answer(prompt: str) -> str:
        turns, reasons = turns_of(re.split(f"(?={re.escape(BEGIN)})", prompt)), list[str]()
        for script in scripts:
            reply, lack = _reply(script, turns)
            if lack is None:
                return reply
            reasons.append(lack)
        raise GenerationError(f"the prompt follows no conversation of the script: {'; '.join(reasons)}")

    return answer


def _reply(script: Sequence[Line], turns: Sequence[Turn]) -> tuple[str, str | None]:
    """The answer that follows the turns, and a description of what they lack for it, or None."""
    if [turn.role for turn in turns] == [""]:
        return "", "its prompts are not ChatML; give a function of the prompt"
    places = [place for place, (role, _) in enumerate(script) if role == "assistant"]
    given = sum(turn.role == "assistant" for turn in turns)
    if given >= len(places):
        return "", f"it has {len(places)} answers, and the prompt holds {given}"
    before = [Said(role, (text,)) for role, text in script[: places[given]]]
    return script[places[given]][1], missing(before, turns)


def _check(script: Sequence[Line]) -> None:
    for line in script:
        if not isinstance(line, tuple | list) or len(line) != 2 or line[0] not in ROLES:
            raise ConfigError(f"{line!r} is not a line of a conversation: give (role, text), with a role of {ROLES}")


class ScriptedText:
    """One request's script: the answer that begins after `prompt_length` tokens.

    The tokenizer is byte-level. Layout, which is white space outside JSON strings and next to punctuation or a tag, may
    be left out or added, as a constraint requires; with any other difference the answer has left the script.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt_length: int, answer: str) -> None:
        self._end = int(tokenizer.eos_token_id)
        self._prompt_length = prompt_length
        self._ids = (*tokenizer.encode(answer, add_special_tokens=False), self._end)
        self._pieces = pieces_of(tokenizer)
        self._tokens = {piece: token for token, piece in self._pieces.items()}
        self._longest = max(map(len, self._tokens))
        self._text = self._bytes(self._ids[:-1])
        self._layout = layout_of(self._text)

    def wishes(self, token_ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens by which the script continues `token_ids` (prompt and answer so far), the literal next one first.

        Next come alternatives that a constraint may require: without layout, in smaller pieces, with white space added.
        Last come the tokens that end the answer soonest; they are the only ones once the answer has left the script.
        """
        given = tuple(token_ids[self._prompt_length :])
        said = self._bytes(given)
        at = self._place(said)
        ends = (self._end, *(self._tokens[closer] for closer in CLOSERS))
        if at is None:
            return ends
        to_the_letter = given == self._ids[: len(given)] and len(given) < len(self._ids)
        bare = self._after_layout(at)
        spaces = SPACES if self._layout[at] and said[-1:] not in SPACES else ()
        literal = self._ids[len(given)] if to_the_letter else self._token_at(self._text[at:])
        without = (self._token_at(self._text[bare:]), self._token_at(self._text[bare : bare + 1]))
        return tuple(dict.fromkeys((literal, *without, *(self._tokens[space] for space in spaces), *ends)))

    def lost(self, token_ids: Sequence[int]) -> str | None:
        """The rest of the script at the place where the answer left it or ended too soon; None if it did neither."""
        given = tuple(token_ids[self._prompt_length :])
        ended = self._end in given
        said = self._bytes(given[: given.index(self._end)] if ended else given)
        at = self._place(said)
        if at is not None and not (ended and self._after_layout(at) < len(self._text)):
            return None
        while at is None:
            said = said[:-1]
            at = self._place(said)
        return self._text[at:].decode(errors="replace")

    def _place(self, said: bytes) -> int | None:
        """The answer's position in the script, None if it has left the script."""
        at = 0
        for byte in said:
            if byte not in self._text[at : at + 1]:
                at = self._after_layout(at)
            if byte in self._text[at : at + 1]:
                at += 1
            elif byte not in BLANK or not self._layout[at]:
                return None
        return at

    def _after_layout(self, at: int) -> int:
        while at < len(self._text) and self._text[at] in BLANK and self._layout[at]:
            at += 1
        return at

    def _token_at(self, rest: bytes) -> int:
        """The longest token that `rest` starts with; the end token if nothing is left."""
        lengths = range(min(self._longest, len(rest)), 0, -1)
        return next((self._tokens[rest[:n]] for n in lengths if rest[:n] in self._tokens), self._end)

    def _bytes(self, token_ids: Sequence[int]) -> bytes:
        return b"".join(self._pieces.get(token, b"") for token in token_ids)


def layout_of(text: bytes) -> list[bool]:
    """For every position in a text, its end included, whether white space there is layout."""
    layout = [True] * (len(text) + 1)
    for gap in _GAP.finditer(text):
        around = (text[gap.start() - 1 : gap.start()], text[gap.end() : gap.end() + 1])
        is_layout = b"" in around or any(one in PUNCTUATION for one in around)
        layout[gap.start() : gap.end() + 1] = [is_layout] * (gap.end() + 1 - gap.start())
    for string in _STRING.finditer(text):
        layout[string.start() + 1 : string.end()] = [False] * (string.end() - string.start() - 1)
    return layout


@lru_cache(maxsize=8)
def pieces_of(tokenizer: PreTrainedTokenizerBase) -> Mapping[int, bytes]:
    """The bytes of every token of a byte-level tokenizer; for control tokens, the bytes of their text."""
    byte_of = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
    special = set(tokenizer.all_special_ids)
    return {
        token: piece.encode() if token in special else bytes(byte_of[symbol] for symbol in piece)
        for piece, token in tokenizer.get_vocab().items()
    }


def forbidden(lost: str) -> GenerationError:
    """The error of a request whose answer could not continue with `lost`."""
    return GenerationError(
        f"a grammar or another constraint forbids what the script says next, {lost[:60]!r}: change the script, or let "
        "the answer end early with may_stray=True"
    )


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


def chatml_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """A byte-level tokenizer with ChatML tokens and no merges: one token per byte, so any character can be split."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template, tokenizer.bos_token = chat_template, None
    return tokenizer
