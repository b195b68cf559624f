"""`POST /v1/completions`: texts continued as they stand, without a chat template."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from openai.types import Completion
from openai.types.completion_create_params import CompletionCreateParamsBase
from starlette.requests import Request
from starlette.responses import Response

from precedent.config import SamplingParams
from precedent.errors import PrecedentError
from precedent.langchain.telemetry import current_span, describe_request
from precedent.runtime.plain_values import check_plain
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.codec import check_length
from precedent.text.query import recall_query
from precedent_server.answers import Answer, reply, speculation_of, steps_of, usage_of
from precedent_server.bodies import SAMPLING, Keys, biases, checked, parsed
from precedent_server.errors import ApiError, api_error
from precedent_server.keys import Caller
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits
from precedent_server.transport import DONE, error_event, event, read_body

KEYS = Keys(
    CompletionCreateParamsBase,
    required=("model", "prompt"),
    supported=(
        "model",
        "prompt",
        "stream",
        "stream_options",
        "n",
        "max_tokens",
        "logit_bias",
        "echo",
        *SAMPLING.openai,
    ),
    own={"stream": bool, "prompt": str | list[str] | list[int] | list[list[int]], **SAMPLING.own},
    instead={
        "best_of": "every answer is returned: ask for n",
        "suffix": "a text is only continued: put what follows it into the prompt",
    },
)

MAX_TOKENS = 16
"""OpenAI's default for this route."""


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Prompts, each with as many answers as `num_choices`; answers are numbered prompt by prompt."""

    model: str
    prompts: Sequence[str | Sequence[int]]
    sampling: Mapping[str, Any]
    num_choices: int
    echo: bool
    stream: bool
    include_usage: bool

    @property
    def num_answers(self) -> int:
        """Answers to all prompts."""
        return self.num_choices * len(self.prompts)

    def prompt(self, index: int) -> str | Sequence[int]:
        """The prompt of answer number `index`: a text or token ids."""
        return self.prompts[index // self.num_choices]


def text_request(raw: bytes, limits: ServerLimits) -> TextRequest:
    """Read a body. Raises ApiError that names the key."""
    said = checked(parsed(raw), KEYS)
    given, echo = said["prompt"], said.get("echo", False)
    prompts = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
    if not prompts:
        raise ApiError("prompt is empty", param="prompt")
    if not 1 <= said.get("n", 1) * len(prompts) <= limits.max_choices:
        raise ApiError(f"n times the number of prompts must be between 1 and {limits.max_choices}", param="n")
    if echo and ("logprobs" in said or not all(isinstance(prompt, str) for prompt in prompts)):
        raise ApiError("echo is supported for texts, without logprobs", param="echo", code="unsupported_value")
    sampling = {name: said[name] for name in ("max_tokens", *SAMPLING.openai, *SAMPLING.own) if name in said}
    if isinstance(sampling.get("stop"), list):
        sampling["stop"] = tuple(sampling["stop"])
    if "logit_bias" in said:
        sampling["logit_bias"] = biases(said["logit_bias"])
    include_usage = said.get("stream_options", {}).get("include_usage") is True
    return TextRequest(
        said["model"], prompts, sampling, said.get("n", 1), echo, said.get("stream", False), include_usage
    )


async def completions(serving: Serving, caller: Caller, request: Request) -> Response:
    """Answer one request, whole or as a stream."""
    asked = await read_body(request, serving, lambda raw: text_request(raw, serving.limits))
    begin = partial(_begin, serving.model(asked.model), asked, caller.tenant)
    write = partial(TextWriter, asked)
    return await reply(
        serving, caller, request, number=asked.num_answers, begin=begin, write=write, stream=asked.stream
    )


def _begin(served: Served, asked: TextRequest, tenant: str, index: int) -> Answer:
    prompt, seed, engine = asked.prompt(index), asked.sampling.get("seed"), served.engine
    choice = {} if seed is None else {"seed": seed + index % asked.num_choices}
    try:
        check_plain("prompt", prompt)
        sampling = SamplingParams(**served.settings_of({**asked.sampling, **choice}, MAX_TOKENS))
        text = prompt if isinstance(prompt, str) else ""
        check_length(engine.tokenizer, text, engine.context_length)
        ids = engine.tokenizer.encode(text) if isinstance(prompt, str) else prompt
        query = recall_query([{"role": "user", "content": text}])
        generation = engine.submit(ids, sampling, tenant=tenant, query=query)
        if (span := current_span()) is not None:
            describe_request(span, "text_completion", served.name, sampling)
    except PrecedentError as error:
        raise api_error(error, KEYS.known) from error
    return Answer(index, engine, generation)


class TextWriter:
    """Writes answers as OpenAI's completions, whole or as a stream of chunks."""

    def __init__(self, asked: TextRequest, answers: Sequence[Answer]) -> None:
        self._asked, self._answers = asked, answers
        self._head = {
            "id": f"cmpl-{secrets.token_hex(12)}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": asked.model,
        }
        self._lengths = Counter[int]()
        """Characters told so far by answer: offsets of log-probabilities."""

    def whole(self) -> dict[str, Any]:
        """The completion of answers that were read to their ends."""
        choices = list[dict[str, Any]]()
        for answer in self._answers:
            found = answer.result
            choices.append(self._choice(answer, self._echo(answer) + found.text, found.logprobs, found.finish_reason))
        told = {**self._head, "choices": choices, "usage": self._usage(), "speculation": speculation_of(self._answers)}
        return Completion.model_validate(told).model_dump(mode="json", exclude_unset=True)

    async def events(self) -> AsyncGenerator[str, None]:
        """The chunks of a stream."""
        for answer in self._answers:
            if echo := self._echo(answer):
                yield self._chunk([self._choice(answer, echo)])
        async for answer, emission, _ in steps_of(self._answers):
            if emission.text or emission.logprobs:
                yield self._chunk([self._choice(answer, emission.text, emission.logprobs)])
        for answer in self._answers:
            end = self._choice(answer, "", (), answer.result.finish_reason)
            yield self._chunk([end], speculation=speculation_of([answer]))
        if self._asked.include_usage:
            yield self._chunk([], usage=self._usage())
        yield DONE

    def failed(self, error: ApiError) -> str:
        """The event that ends a stream which failed."""
        return error_event(error)

    def _echo(self, answer: Answer) -> str:
        return str(self._asked.prompt(answer.index)) if self._asked.echo else ""

    def _usage(self) -> Any:
        return usage_of(self._answers, len(self._asked.prompts))

    def _chunk(self, choices: list[dict[str, Any]], **rest: Any) -> str:
        told = {**self._head, "choices": choices, **({"usage": None} if self._asked.include_usage else {}), **rest}
        chunk = Completion.construct(**told)  # unchecked: chunks have no reason yet
        return event(chunk.model_dump_json(exclude_unset=True))

    def _choice(
        self, answer: Answer, text: str, logprobs: Sequence[TokenLogprob] = (), finish_reason: str | None = None
    ) -> dict[str, Any]:
        told = self._logprobs(answer, logprobs) if logprobs else None
        return {"index": answer.index, "text": text, "logprobs": told, "finish_reason": finish_reason}

    def _logprobs(self, answer: Answer, told: Sequence[TokenLogprob]) -> dict[str, Any]:
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
