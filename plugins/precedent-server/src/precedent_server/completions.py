"""`POST /v1/completions`: texts continued as they stand, without a chat template."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from openai.types import Completion
from openai.types.completion_create_params import CompletionCreateParamsBase

from precedent.config import SamplingParams
from precedent.langchain.answers import current_span, describe_request
from precedent.runtime.plain_values import check_plain
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.answers import Piece
from precedent.text.codec import check_length
from precedent.text.query import recall_query
from precedent.text.tool_formats import TextPiece
from precedent_server.answers import Answer, Asked, ChunkWriter, answering
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
    if said.get("echo") and ("logprobs" in said or not all(isinstance(prompt, str) for prompt in prompts)):
        raise unsupported("echo is supported for texts, without logprobs", "echo")
    settings = {name: said[name] for name in ("max_tokens", *SAMPLING, *OWN_SAMPLING) if name in said}
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
        generation = engine.submit(ids, sampling, tenant=tenant, query=query)
        if (span := current_span()) is not None:
            describe_request(span, "text_completion", served.name, sampling)
        return Answer(index, engine, generation, len(ids))

    return Asked(
        model=said["model"],
        number=number * len(prompts),
        num_prompts=len(prompts),
        stream=said.get("stream", False),
        begin=begin,
        write=partial(TextWriter, said, prompts),
        keys=KEYS.known,
    )


class TextWriter(ChunkWriter):
    """Writes answers as OpenAI's completions."""

    prefix, kinds = "cmpl", ("text_completion", "text_completion")
    whole_body = chunk_body = Completion

    def __init__(self, said: Mapping[str, Any], prompts: Sequence[Any], answers: Sequence[Answer]) -> None:
        super().__init__(said, answers, len(prompts))
        self._echo = [str(prompt) if said.get("echo") else "" for prompt in prompts for _ in range(said.get("n", 1))]
        self._lengths = Counter[int]()
        """Characters told so far by answer: offsets of log-probabilities."""

    def choice(self, answer: Answer) -> dict[str, Any]:
        """A whole answer."""
        told = {
            "text": self._echo[answer.index] + answer.text,
            "logprobs": self.logprobs(answer, answer.result.logprobs),
        }
        return {"index": answer.index, "finish_reason": answer.finish_reason, **told}

    def beginning(self, answer: Answer) -> dict[str, Any] | None:
        """The prompt, if it is echoed."""
        echo = self._echo[answer.index]
        return {"text": echo} if echo else None

    def part(self, piece: Piece | None) -> dict[str, Any]:
        """A piece of the text."""
        return {"text": piece.text if isinstance(piece, TextPiece) else ""}

    def logprobs(self, answer: Answer, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """OpenAI's log-probabilities of some tokens on this route, None if there are none."""
        if not told:
            return None
        decode = answer.engine.tokenizer.decode
        texts, offsets = [str(decode([one.token_id])) for one in told], list[int]()
        for text in texts:
            offsets.append(self._lengths[answer.index])
            self._lengths[answer.index] += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in told],
            "top_logprobs": [{str(decode([token])): value for token, value in one.top} for one in told],
            "text_offset": offsets,
        }


completions = answering(text_request, "prompt")
