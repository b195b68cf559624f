"""`POST /v1/completions`: texts continued as they stand, without a chat template, and scored with `echo`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

from openai.types import Completion, CompletionChoice
from openai.types.completion_choice import Logprobs
from openai.types.completion_create_params import CompletionCreateParamsBase

from precedent.config import PromptScores, SamplingParams
from precedent.langchain.answers import current_span, describe_request
from precedent.runtime.plain_values import check_plain
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.answers import Piece
from precedent.text.codec import check_length
from precedent.text.query import recall_query
from precedent.text.tool_formats import TextPiece
from precedent_server.answers import Answer, Asked, ChunkWriter, Echo, answering
from precedent_server.bodies import OWN_SAMPLING, SAMPLING, Keys, biases, checked, unsupported
from precedent_server.errors import ApiError
from precedent_server.serving import Served
from precedent_server.settings import ServerLimits

KEYS = Keys(
    CompletionCreateParamsBase,
    required=("model", "prompt"),
    supported=(
        *("model", "prompt", "stream", "stream_options", "n", "max_tokens", "logit_bias", "echo"),
        *SAMPLING,
    ),
    own={"stream": bool, "prompt": str | list[str] | list[int] | list[list[int]], **OWN_SAMPLING},
    instead={
        "best_of": "every answer is returned: ask for n",
        "suffix": "a text is only continued: put what follows it into the prompt",
    },
)

MAX_TOKENS = 16
"""OpenAI's default for this route."""

MOST_ECHOED_LOGPROBS = 5
"""Likeliest tokens at each place of an echoed prompt, as in OpenAI's API: a prompt may fill the context."""


class EchoedLogprobs(Logprobs):
    """Log-probabilities of an answer's tokens, or of a prompt's too, whose first token has none."""

    token_logprobs: list[float | None] | None = None  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class TextChoice(CompletionChoice):
    """One answer."""

    logprobs: EchoedLogprobs | None = None


class TextCompletion(Completion):
    """All answers."""

    choices: list[TextChoice]  # type: ignore[assignment]


def text_request(
    body: Mapping[str, Any],
    limits: ServerLimits,
    of_model: Callable[[Served], Mapping[str, Any]] = lambda served: {},
    default_max_tokens: int = MAX_TOKENS,
) -> Asked:
    """Read a parsed body: each prompt has `n` answers in a row. Raises ApiError that names the key.

    `of_model` gives settings that depend on the model.
    """
    said = checked(body, KEYS)
    given, number = said["prompt"], said.get("n", 1)
    prompts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not prompts:
        raise ApiError("prompt is empty", param="prompt")
    if not 1 <= number * len(prompts) <= limits.max_choices:
        raise ApiError(f"n times the number of prompts must be between 1 and {limits.max_choices}", param="n")
    echo, scored = said.get("echo", False), "logprobs" in said
    if echo and scored and said.get("stream"):
        raise unsupported("the log-probabilities of an echoed prompt are not streamed: leave stream out", "echo")
    if echo and said.get("logprobs", 0) > MOST_ECHOED_LOGPROBS:
        raise ApiError(f"logprobs must be at most {MOST_ECHOED_LOGPROBS} with echo", param="logprobs")
    alone = echo and said.get("max_tokens") == 0  # the prompt without an answer
    scores = PromptScores(said.get("logprobs", 0), alone=alone) if echo and (scored or alone) else None
    settings = {name: said[name] for name in ("max_tokens", *SAMPLING, *OWN_SAMPLING) if name in said}
    if alone:
        del settings["max_tokens"]
    if isinstance(settings.get("stop"), list):
        settings["stop"] = tuple(settings["stop"])
    if "logit_bias" in said:
        settings["logit_bias"] = biases(said["logit_bias"])

    def begin(served: Served, tenant: str, index: int) -> Answer:
        prompt, engine, seed = prompts[index // number], served.engine, settings.get("seed")
        check_plain("prompt", prompt)
        choice = {} if seed is None else {"seed": seed + index % number}
        given = {**settings, **of_model(served), **choice}
        sampling = SamplingParams(**served.settings_of(given, default_max_tokens))
        text = prompt if isinstance(prompt, str) else ""
        check_length(engine.tokenizer, text, engine.context_length)
        ids = engine.tokenizer.encode(text) if isinstance(prompt, str) else prompt
        query = recall_query([{"role": "user", "content": text}])
        generation = engine.submit(ids, sampling, tenant=tenant, query=query, scores=scores)
        if (span := current_span()) is not None:
            describe_request(span, "text_completion", served.name, sampling)
        echoed = Echo(text or str(engine.tokenizer.decode(ids)), ids[0]) if echo else None
        return Answer(index, engine, generation, len(ids), echo=echoed)

    return Asked(
        model=said["model"],
        number=number * len(prompts),
        num_prompts=len(prompts),
        stream=said.get("stream", False),
        begin=begin,
        write=partial(TextWriter, said, len(prompts)),
        keys=KEYS.known,
        renamed={"scores": "echo"},
    )


class TextWriter(ChunkWriter):
    """Writes answers as OpenAI's completions."""

    prefix, kinds = "cmpl", ("text_completion", "text_completion")
    whole_body = chunk_body = TextCompletion

    def __init__(self, said: Mapping[str, Any], num_prompts: int, answers: Sequence[Answer]) -> None:
        super().__init__(said, answers, num_prompts)
        self._scored = "logprobs" in said
        self._lengths = Counter[int]()
        """Characters told so far by answer: offsets of log-probabilities."""

    def choice(self, answer: Answer) -> dict[str, Any]:
        """A whole answer, after its prompt if that is echoed."""
        result, echo, text = answer.result, answer.echo, answer.text
        logprobs = self.logprobs(answer, result.logprobs) if echo is None else None
        if echo is not None:
            text = echo.text + text
        if echo is not None and self._scored:
            told = (*result.prompt_logprobs, *result.logprobs)
            logprobs = self._written_logprobs(answer, told, unscored=[echo.first_id])
        return {"index": answer.index, "finish_reason": answer.finish_reason, "text": text, "logprobs": logprobs}

    def beginning(self, answer: Answer) -> dict[str, Any] | None:
        """The prompt, if it is echoed."""
        return None if answer.echo is None else {"text": answer.echo.text}

    def part(self, piece: Piece | None) -> dict[str, Any]:
        """A piece of the text."""
        return {"text": piece.text if isinstance(piece, TextPiece) else ""}

    def logprobs(self, answer: Answer, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """OpenAI's log-probabilities of some tokens on this route, None if there are none."""
        return self._written_logprobs(answer, told) if told else None

    def _written_logprobs(
        self, answer: Answer, told: Sequence[TokenLogprob], unscored: Sequence[int] = ()
    ) -> dict[str, Any]:
        """The same, after tokens without any: the first of a prompt follows nothing."""
        decode, offsets = answer.engine.tokenizer.decode, list[int]()
        text_of = cache(lambda token: str(decode([token])))  # a long prompt repeats its tokens
        texts = [text_of(token) for token in (*unscored, *(one.token_id for one in told))]
        for text in texts:
            offsets.append(self._lengths[answer.index])
            self._lengths[answer.index] += len(text)
        none: list[Any] = [None] * len(unscored)
        return {
            "tokens": texts,
            "token_logprobs": none + [one.logprob for one in told],
            "top_logprobs": none + [_by_text(one, text_of) for one in told],
            "text_offset": offsets,
        }


def _by_text(told: TokenLogprob, text_of: Callable[[int], str]) -> dict[str, float]:
    """The likeliest tokens by text; of several with one text, as parts of characters have, the first."""
    found = dict[str, float]()
    for token, value in told.top:
        found.setdefault(text_of(token), value)
    return found


completions = answering(text_request, "prompt")
