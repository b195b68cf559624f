"""`POST /v1/completions`: texts continued as they stand, without a chat template."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from openai.types import Completion
from openai.types.completion_create_params import CompletionCreateParamsBase
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from precedent.config import SamplingParams
from precedent.engine.generation import Emission, Generation, GenerationResult
from precedent.errors import PrecedentError
from precedent.langchain.telemetry import Span, current_span, describe_request, describe_result
from precedent.runtime.plain_values import check_plain
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.codec import check_length
from precedent.text.query import recall_query
from precedent_server.bodies import Keys, biases, checked, parsed
from precedent_server.errors import ApiError, api_error
from precedent_server.keys import Caller
from precedent_server.merging import merged
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits
from precedent_server.transport import DONE, EventStream, error_event, event, failure, read_body, unless_gone
from precedent_server.usage import speculation_of, usage_of

_SAMPLING = (
    *("temperature", "top_p", "frequency_penalty", "presence_penalty", "stop"),
    *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "seed", "logprobs", "max_tokens"),
)

KEYS = Keys(
    CompletionCreateParamsBase,
    required=("model", "prompt"),
    supported=(
        *("model", "prompt", "stream", "stream_options", "n", "max_tokens", "logit_bias", "logprobs", "echo"),
        *("temperature", "top_p", "frequency_penalty", "presence_penalty", "seed", "stop"),
    ),
    own={
        "stream": bool,
        "prompt": str | list[str] | list[int] | list[list[int]],
        "top_k": int,
        "min_p": float,
        "repetition_penalty": float,
        "stop_token_ids": list[int],
    },
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


def text_request(body: Mapping[str, Any], limits: ServerLimits) -> TextRequest:
    """Read a parsed body. Raises ApiError that names the key."""
    said = checked(body, KEYS)
    prompts, echo = _prompts(said["prompt"]), said.get("echo", False)
    if not 1 <= said.get("n", 1) * len(prompts) <= limits.max_choices:
        raise ApiError(f"n times the number of prompts must be between 1 and {limits.max_choices}", param="n")
    if echo and ("logprobs" in said or not all(isinstance(prompt, str) for prompt in prompts)):
        raise ApiError("echo is supported for texts, without logprobs", param="echo", code="unsupported_value")
    sampling = {name: said[name] for name in _SAMPLING if name in said}
    if isinstance(sampling.get("stop"), list):
        sampling["stop"] = tuple(sampling["stop"])
    if "logit_bias" in said:
        sampling["logit_bias"] = biases(said["logit_bias"])
    return TextRequest(
        said["model"],
        prompts,
        sampling,
        said.get("n", 1),
        echo,
        said.get("stream", False),
        said.get("stream_options", {}).get("include_usage") is True,
    )


def _prompts(given: Any) -> list[Any]:
    """The prompts, of which each is a text or token ids."""
    one = isinstance(given, str) or (given and isinstance(given[0], int))
    found = [given] if one else list(given)
    if not found:
        raise ApiError("prompt is empty", param="prompt")
    return found


@dataclass(slots=True)
class TextAnswer:
    """One continuation while it runs; characters are counted for the offsets of log-probabilities."""

    index: int
    generation: Generation
    served: Served
    echoed: str
    span: Span | None
    length: int = 0

    def logprobs(self, told: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """Log-probabilities in the form of this route."""
        if not told:
            return None
        decode = self.served.engine.tokenizer.decode
        texts, offsets = [str(decode([one.token_id])) for one in told], list[int]()
        for text in texts:
            offsets.append(self.length)
            self.length += len(text)
        return {
            "tokens": texts,
            "token_logprobs": [one.logprob for one in told],
            "top_logprobs": [{str(decode([token])): value for token, value in one.top} for one in told],
            "text_offset": offsets,
        }


async def completions(serving: Serving, caller: Caller, request: Request) -> Response:
    """Answer one request, whole or as a stream."""
    asked = await read_body(request, serving, partial(_asked, serving.limits))
    served = serving.model(asked.model)
    with ExitStack() as held:
        held.enter_context(serving.places.taken(caller.name, asked.num_choices * len(asked.prompts)))
        answers = list[TextAnswer]()
        for index in range(asked.num_choices * len(asked.prompts)):
            begin = partial(_begin, served, asked, index, caller.tenant)
            begun = serving.prepared(begin, lambda answer: answer.generation.cancel())
            answers.append(await unless_gone(request, serving.limits, begun))
            held.callback(answers[-1].generation.cancel)
        if asked.stream:
            return EventStream(_events(answers, asked, held.pop_all()), serving.limits, serving.places, error_event)
        await unless_gone(request, serving.limits, _read(answers))
        return JSONResponse(_whole(answers, asked))


def _asked(limits: ServerLimits, raw: bytes) -> TextRequest:
    return text_request(parsed(raw), limits)


def _begin(served: Served, asked: TextRequest, index: int, tenant: str) -> TextAnswer:
    prompt, seed = asked.prompts[index // asked.num_choices], asked.sampling.get("seed")
    choice = {} if seed is None else {"seed": seed + index % asked.num_choices}
    try:
        check_plain("prompt", prompt)
        sampling = SamplingParams(**served.settings_of({**asked.sampling, **choice}, MAX_TOKENS))
        text = prompt if isinstance(prompt, str) else ""
        check_length(served.engine.tokenizer, text, served.engine.context_length)
        ids = served.engine.tokenizer.encode(text) if isinstance(prompt, str) else prompt
        query = recall_query([{"role": "user", "content": text}])
        generation = served.engine.submit(ids, sampling, tenant=tenant, query=query)
        if (span := current_span()) is not None:
            describe_request(span, "text_completion", served.name, sampling)
    except PrecedentError as error:
        raise api_error(error, KEYS.known) from error
    return TextAnswer(index, generation, served, text if asked.echo else "", span)


async def _read(answers: Sequence[TextAnswer]) -> None:
    async for _ in merged([_steps(answer) for answer in answers]):
        pass


async def _steps(answer: TextAnswer) -> AsyncGenerator[tuple[TextAnswer, Emission], None]:
    async for emission in answer.generation:
        yield answer, emission
    if answer.span is not None:
        describe_result(answer.span, answer.served.name, answer.generation.result())


def _whole(answers: Sequence[TextAnswer], asked: TextRequest) -> dict[str, Any]:
    results = [answer.generation.result() for answer in answers]
    choices = [
        _choice(answer, answer.echoed + result.text, result.logprobs, result.finish_reason)
        for answer, result in zip(answers, results, strict=True)
    ]
    told = {"choices": choices, "usage": _usage(results, asked), "speculation": speculation_of(results)}
    return Completion.model_validate({**_head(asked.model), **told}).model_dump(mode="json", exclude_unset=True)


async def _events(answers: Sequence[TextAnswer], asked: TextRequest, held: ExitStack) -> AsyncGenerator[str, None]:
    head = _head(asked.model)

    def written(choices: list[dict[str, Any]], **rest: Any) -> str:
        told = {**head, "choices": choices, **({"usage": None} if asked.include_usage else {}), **rest}
        chunk = Completion.construct(**told)  # unchecked: chunks have no reason yet
        return event(chunk.model_dump_json(exclude_unset=True))

    with held:
        try:
            for answer in answers:
                if answer.echoed:
                    yield written([_choice(answer, answer.echoed)])
            async for answer, emission in merged([_steps(answer) for answer in answers]):
                if emission.text or emission.logprobs:
                    yield written([_choice(answer, emission.text, emission.logprobs)])
            results = [answer.generation.result() for answer in answers]
            for answer, result in zip(answers, results, strict=True):
                end = _choice(answer, "", (), result.finish_reason)
                yield written([end], speculation=speculation_of([result]))
            if asked.include_usage:
                yield written([], usage=_usage(results, asked))
            yield DONE
        except Exception as error:
            yield error_event(failure(error))


def _choice(
    answer: TextAnswer, text: str, logprobs: Sequence[TokenLogprob] = (), finish_reason: str | None = None
) -> dict[str, Any]:
    return {
        "index": answer.index,
        "text": text,
        "logprobs": answer.logprobs(logprobs),
        "finish_reason": finish_reason,
    }


def _usage(results: Sequence[GenerationResult], asked: TextRequest) -> Any:
    """The usage of all answers; every prompt counts once."""
    usage = usage_of(results)
    usage.prompt_tokens = sum(result.prompt_tokens for result in results[:: asked.num_choices])
    usage.total_tokens = usage.prompt_tokens + usage.completion_tokens
    return usage


def _head(model: str) -> dict[str, Any]:
    return {
        "id": f"cmpl-{secrets.token_hex(12)}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }
