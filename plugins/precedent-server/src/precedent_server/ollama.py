"""Ollama's interface: `/api/chat`, `/api/generate`, `/api/embed` and others.

A body is read by writing it as one of `/v1/chat/completions`, or of `/v1/completions` where it is raw. What Ollama
ignores is ignored and counted.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, NoReturn, Protocol, get_type_hints

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from precedent.langchain.profile import profile_of_engine
from precedent.runtime.plain_values import shown
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.answers import Piece
from precedent.text.prompt import template_for
from precedent.text.template_settings import EFFORT, SWITCHES, template_variables
from precedent.text.tool_formats import ReasoningPiece, TextPiece
from precedent.text.tool_formats.json_text import load_object
from precedent_server.answers import Answer, Asked, answering, logprobs_of, speculation_of, steps_of
from precedent_server.bodies import Keys, checked, fits, parsed, unsupported, without_nulls
from precedent_server.chat import chat_request
from precedent_server.completions import text_request
from precedent_server.embeddings import MOST_CHARACTERS, vectors_of
from precedent_server.errors import ApiError
from precedent_server.keys import Caller
from precedent_server.serving import Route, Served, Serving
from precedent_server.settings import MOST_BODY_BYTES, ServerLimits
from precedent_server.transport import read_body, unless_gone

VERSION = "0.12.11"
"""The version of Ollama whose interface this is; clients compare it with the oldest that they can use."""

LINES = "application/x-ndjson"
"""The kind of content of a stream."""


class Message(TypedDict, total=False):
    """A message of a conversation."""

    role: str
    content: str
    thinking: str
    images: list[str]
    tool_calls: list[dict[str, Any]]
    tool_name: str
    tool_call_id: str


class Options(TypedDict, total=False):
    """The options that are read; no other can change an answer here."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    num_predict: int
    stop: str | list[str]
    repeat_penalty: float
    presence_penalty: float
    frequency_penalty: float


class _Body(TypedDict, total=False):
    model: str
    options: dict[str, Any]
    keep_alive: float | str
    truncate: bool


class _Asking(_Body, total=False):
    stream: bool
    format: Literal["", "json"] | dict[str, Any]
    think: bool | Literal["low", "medium", "high"]
    logprobs: bool
    top_logprobs: int


class ChatBody(_Asking, total=False):
    """The body of `/api/chat`."""

    messages: list[Message]
    tools: list[dict[str, Any]]


class GenerateBody(_Asking, total=False):
    """The body of `/api/generate`."""

    prompt: str
    system: str
    raw: bool
    context: list[int]
    suffix: str
    template: str
    images: list[str]


class EmbedBody(_Body, total=False):
    """The body of `/api/embed`."""

    input: str | list[str]
    dimensions: int


class EmbeddingsBody(_Body, total=False):
    """The body of `/api/embeddings`, which `/api/embed` has replaced."""

    prompt: str


class _Ended(TypedDict, total=False):
    model: str
    created_at: str
    done: bool
    done_reason: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int
    logprobs: list[dict[str, Any]]
    speculation: dict[str, Any]


class ChatAnswer(_Ended, total=False):
    """A whole answer of `/api/chat`; durations are in nanoseconds."""

    message: Message


class GenerateAnswer(_Ended, total=False):
    """A whole answer of `/api/generate`; durations are in nanoseconds."""

    response: str
    thinking: str


class EmbedAnswer(TypedDict, total=False):
    """The answer of `/api/embed`."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class EmbeddingsAnswer(TypedDict):
    """The answer of `/api/embeddings`."""

    embedding: list[float]


class VersionAnswer(TypedDict):
    """The answer of `/api/version`."""

    version: str


class ErrorAnswer(TypedDict):
    """The body of every answer with an HTTP status other than 200, and the last line of a stream that failed."""

    error: str


def _keys(body: Any) -> Keys:
    return Keys(body, required=("model",), supported=tuple(get_type_hints(body)), own={}, ignores_others=True)


CHAT, GENERATE, EMBED, EMBEDDINGS = map(_keys, (ChatBody, GenerateBody, EmbedBody, EmbeddingsBody))

_OPTIONS = get_type_hints(Options)

_OPENAI = {"repeat_penalty": "repetition_penalty"}
"""Options that are called otherwise on OpenAI's routes."""

_NAMES = {
    **{ours: name for name, ours in _OPENAI.items()},
    **{"response_format": "format", "max_tokens": "num_predict", "reasoning": "think", "reasoning_content": "thinking"},
}
"""What a request calls settings that messages of errors speak of."""

_NO_MODEL = re.compile(r"^no model (.*) is served here(?=; models: )", re.DOTALL)
_SETTING = re.compile(rf"\b({'|'.join(_NAMES)})\b")

_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = rf"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)({'|'.join(sorted(_UNITS, key=len, reverse=True))})"
_DURATION = re.compile(rf"([-+]?)((?:{_PART})+)")
MOST_DURATION = 100
"""Characters of a duration."""

ELSEWHERE: Mapping[str, tuple[str, str]] = {
    "/api/pull": ("POST", "fetch the model with Ollama, and start the server with --allow-load or --model"),
    "/api/push": ("POST", "models are published with the tools of their hub"),
    "/api/create": ("POST", "a model is a folder or a file: `precedent serve --model NAME=TARGET` names it"),
    "/api/copy": ("POST", "one target can have several names: `precedent serve --model NAME=TARGET`"),
    "/api/delete": ("DELETE", "stop serving the model, and delete its files"),
    "/api/blobs/{digest}": ("POST", "models are loaded from folders and files, not uploaded"),
}
"""Routes of Ollama that are refused, each with its method and what to do instead."""


def error_body(error: ApiError) -> dict[str, Any]:
    """An error in Ollama's form and words."""
    if error.error.code == "model_not_found":  # clients look for these words
        return {"error": _NO_MODEL.sub(r"model \1 not found", error.error.message)}
    return {"error": _SETTING.sub(lambda found: _NAMES[found[0]], error.error.message)}


# Bodies


def chat_asked(body: Mapping[str, Any], limits: ServerLimits) -> Asked:
    """Read a parsed body of `/api/chat`. Raises ApiError that names the key, or a PrecedentError."""
    started = time.perf_counter_ns()
    said, num_ignored = _said(body, CHAT)
    given = without_nulls(said.get("messages", []))
    fits(given, list[Message], "messages")
    if not given:
        return _only_loads(said, _message_of, started, num_ignored)
    messages = [_message(message, f"messages[{position}]") for position, message in enumerate(given)]
    num_ignored += sum(len(message.keys() - get_type_hints(Message).keys()) for message in given)
    tools = [{"type": "function", **tool} for tool in said.get("tools", ())]
    chat: dict[str, Any] = {"messages": messages, **({"tools": tools} if tools else {})}
    return _asked(said, chat, limits, _message_of, started, num_ignored)


def generate_asked(body: Mapping[str, Any], limits: ServerLimits) -> Asked:
    """Read a parsed body of `/api/generate`. Raises ApiError that names the key, or a PrecedentError."""
    started = time.perf_counter_ns()
    said, num_ignored = _said(body, GENERATE)
    _check_images(said, "images")
    if said.get("suffix"):
        raise unsupported("suffix is not supported: a text is only continued", "suffix")
    if said.get("template"):
        raise unsupported("template is not supported: send the whole prompt with raw", "template")
    if said.get("context"):
        raise unsupported("context is not supported: send the conversation to /api/chat", "context")
    if not said.get("prompt"):
        return _only_loads(said, _response_of, started, num_ignored)
    if said.get("raw"):
        return _raw_asked(said, limits, started, num_ignored)
    system = [{"role": "system", "content": said["system"]}] if said.get("system") else []
    messages = [*system, {"role": "user", "content": said["prompt"]}]
    return _asked(said, {"messages": messages}, limits, _response_of, started, num_ignored)


def _said(body: Mapping[str, Any], keys: Keys) -> tuple[dict[str, Any], int]:
    """The keys of a body that are read, and how many keys and options are not."""
    said = checked(body, keys)
    said |= {"format": body["format"]} if "format" in said else {}  # a schema, whose nulls mean something
    return said, len(body.keys() - keys.kinds.keys()) + len(said.get("options", {}).keys() - _OPTIONS.keys())


def _asked(
    said: Mapping[str, Any], chat: dict[str, Any], limits: ServerLimits, part: Part, started: int, num_ignored: int
) -> Asked:
    """A request for an answer to a conversation; `chat` holds the keys of its body that are the route's own."""
    sampling, most_tokens = _sampling(said.get("options", {}))
    if (wanted := said.get("format", "")) != "":
        chat["response_format"] = _format(wanted)
    if said.get("logprobs"):
        chat |= {name: said[name] for name in ("logprobs", "top_logprobs") if name in said}

    def of_model(served: Served) -> dict[str, Any]:
        told = _reasoning(said["think"], served, bool(chat.get("tools"))) if "think" in said else None
        return most_tokens(served) | ({} if told is None else {"reasoning": told})

    asked = chat_request({"model": said["model"], **chat, **sampling}, limits, of_model=of_model)
    return _in_lines(asked, said, part, started, asked.num_ignored + num_ignored)


def _raw_asked(said: Mapping[str, Any], limits: ServerLimits, started: int, num_ignored: int) -> Asked:
    """A request for a text to be continued as it stands."""
    if said.get("system"):
        raise ApiError("raw mode does not support template, system, or context", param="system")
    if said.get("format", "") != "":
        raise unsupported("format is not supported with raw: leave raw out", "format")
    sampling, most_tokens = _sampling(said.get("options", {}))
    if said.get("logprobs"):
        sampling["logprobs"] = said.get("top_logprobs", 0)
    text = {"model": said["model"], "prompt": said["prompt"], **sampling}
    asked = text_request(text, limits, of_model=most_tokens, default_max_tokens=limits.default_max_tokens)
    return _in_lines(asked, said, _response_of, started, num_ignored + ("think" in said))


def _in_lines(asked: Asked, said: Mapping[str, Any], part: Part, started: int, num_ignored: int) -> Asked:
    """The same request, answered in Ollama's form. Streams are the default."""
    return replace(
        asked,
        stream=said.get("stream", True),
        media_type=LINES,
        write=partial(LineWriter, said["model"], part, started),
        num_ignored=num_ignored,
        keep_alive=_keep_alive(said),
    )


def _only_loads(said: Mapping[str, Any], part: Part, started: int, num_ignored: int) -> Asked:
    """A request without a question, which loads its model, or unloads it if it should be kept for no time."""
    keep_alive = _keep_alive(said)
    reason = "unload" if keep_alive == 0 else "load"

    def begin(served: Served, tenant: str, index: int) -> NoReturn:
        raise AssertionError("a request for no answers begins none")

    return Asked(
        model=said["model"],
        number=0,
        stream=False,
        begin=begin,
        write=partial(LineWriter, said["model"], part, started, reason=reason),
        keys=(),
        num_ignored=num_ignored,
        keep_alive=keep_alive,
    )


def _message(said: Mapping[str, Any], place: str) -> dict[str, Any]:
    """A message in a chat completion's words."""
    _check_images(said, f"{place}.images")
    told: dict[str, Any] = {"role": said.get("role"), "content": said.get("content", "")}
    if told["role"] == "assistant":
        told |= {"reasoning_content": said["thinking"]} if said.get("thinking") else {}
        told |= {"tool_calls": said["tool_calls"]} if said.get("tool_calls") else {}
    elif told["role"] == "tool":
        told |= {"tool_call_id": said.get("tool_call_id", "")}
        told |= {"name": said["tool_name"]} if "tool_name" in said else {}
    return told


def _check_images(said: Mapping[str, Any], place: str) -> None:
    if said.get("images"):
        raise unsupported(f"{place} is not supported: only text is read", place)


def _format(wanted: Any) -> dict[str, Any]:
    """A format in a chat completion's words."""
    if wanted == "json":
        return {"type": "json_object"}
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": wanted}}


def _sampling(options: Mapping[str, Any]) -> tuple[dict[str, Any], Callable[[Served], dict[str, Any]]]:
    """The options in OpenAI's words, and the most tokens of an answer, which depend on the model."""
    given = {name: _whole(options[name]) for name in _OPTIONS if options.get(name) is not None}
    for name, value in given.items():
        fits(value, _OPTIONS[name], f"options.{name}")
    limit = given.pop("num_predict", None)

    def most_tokens(served: Served) -> dict[str, Any]:
        """Without a limit (Ollama's -1 and -2) an answer may fill the context."""
        if limit is None:
            return {}
        return {"max_tokens": min(limit, served.engine.context_length) if limit > 0 else served.engine.context_length}

    if given.get("seed", 0) < 0:
        del given["seed"]  # Ollama's word for a seed that is drawn
    if given.get("top_k", 0) < 0:
        given["top_k"] = 0
    if not given.get("stop", "."):
        del given["stop"]
    return {_OPENAI.get(name, name): value for name, value in given.items()}, most_tokens


def _whole(value: Any) -> Any:
    """JavaScript's and Go's clients may write whole numbers with a fraction of zero."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _reasoning(think: bool | str, served: Served, has_tools: bool) -> bool | str | None:
    """What to tell the model's template about thinking; None if it has no switch. Raises ApiError if it never thinks.

    Templates with a switch know no levels, and those with levels cannot be switched off; Ollama takes either for both.
    """
    readable = template_variables(template_for(served.engine.tokenizer, (), has_tools))
    if any(name in readable for name in SWITCHES):
        return bool(think)
    if EFFORT in readable:
        return think if isinstance(think, str) else None
    if think and not profile_of_engine(served.engine).get("reasoning_output"):
        raise unsupported(f"{shown(served.name)} does not support thinking", "think")
    return None


def _keep_alive(said: Mapping[str, Any]) -> float | None:
    """How many seconds the model should stay loaded: any number below 0 means for ever."""
    if "keep_alive" not in said:
        return None
    given = said["keep_alive"]
    seconds = _seconds(given) if isinstance(given, str) else given
    return float(seconds) if 0 <= seconds <= 1e9 else math.inf


def _seconds(text: str) -> float:
    """A duration as Go writes it. Raises ApiError for another text."""
    if text.lstrip("+-") == "0":
        return 0.0
    found = _DURATION.fullmatch(text) if len(text) <= MOST_DURATION else None
    if found is None:
        raise ApiError(f"keep_alive={shown(text)} must be seconds, or a duration such as '5m' or '1h30m'")
    seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, found[2]))
    return -seconds if found[1] == "-" else seconds


# Answers


class Part(Protocol):
    """What an object says of an answer's text, its thoughts and its calls."""

    def __call__(self, text: str = "", thinking: str = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
        """The keys of the object."""


def _message_of(text: str = "", thinking: str = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text}
    message |= {"thinking": thinking} if thinking else {}
    message |= {"tool_calls": list(calls)} if calls else {}
    return {"message": message}


def _response_of(text: str = "", thinking: str = "", calls: Sequence[Any] = ()) -> dict[str, Any]:
    return {"response": text, **({"thinking": thinking} if thinking else {})}


class LineWriter:
    """Writes an answer as Ollama's objects: one, or the lines of a stream, whose last one says how it ended.

    Without an answer the object gives `reason`. A call comes whole. `started` is when the request came, on the clock of
    `perf_counter_ns`.
    """

    def __init__(self, model: str, part: Part, started: int, answers: list[Answer], reason: str = "") -> None:
        self._model, self._part, self._started, self._reason = model, part, started, reason
        self._begun = time.perf_counter_ns()
        self._answer = answers[0] if answers else None
        self._num_calls = 0

    def whole(self) -> dict[str, Any]:
        """The object of an answer that was read to its end."""
        answer = self._answer
        if answer is None:
            return self._object(self._part(), done=True, done_reason=self._reason, **self._durations())
        calls, broken = _calls(answer.calls, 0)
        told = self._part(answer.text + broken, answer.reasoning, calls)
        return self._object(told, **self._logprobs(answer.result.logprobs), **self._end(answer))

    async def events(self) -> AsyncGenerator[str, None]:
        """The lines of a stream."""
        answer = self._answer
        assert answer is not None
        untold = list[TokenLogprob]()
        async for _, emission, pieces in steps_of([answer]):
            untold += emission.logprobs
            lines = ""
            for told in self._parts(answer, pieces):
                lines += self._line(told, done=False, **self._logprobs(untold))
                untold.clear()
            if lines:
                yield lines
        yield self._line(self._part(), **self._logprobs(untold), **self._end(answer))

    def failed(self, error: ApiError) -> str:
        """The line that ends a stream which failed."""
        return json.dumps(error_body(error)) + "\n"

    def _parts(self, answer: Answer, pieces: Sequence[Piece]) -> Iterator[dict[str, Any]]:
        """What lines say of some pieces, in which all calls are whole."""
        for piece in pieces:
            if isinstance(piece, TextPiece):
                yield self._part(piece.text)
            elif isinstance(piece, ReasoningPiece):
                yield self._part(thinking=piece.text)
            elif piece.call_id is not None:
                call = answer.calls[self._num_calls]
                self._num_calls += 1
                calls, broken = _calls([call], self._num_calls - 1)
                yield self._part(broken, calls=calls)

    def _object(self, told: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        now = datetime.now(UTC).isoformat().replace("+00:00", "Z")
        return {"model": self._model, "created_at": now, **told, **more}

    def _line(self, told: Mapping[str, Any], **more: Any) -> str:
        return json.dumps(self._object(told, **more), ensure_ascii=False) + "\n"

    def _logprobs(self, told: Sequence[TokenLogprob]) -> dict[str, Any]:
        found = None if self._answer is None else logprobs_of(self._answer, told)
        return {} if found is None else {"logprobs": found["content"]}

    def _end(self, answer: Answer) -> dict[str, Any]:
        """How an answer ended; durations are in nanoseconds, and clients divide by them."""
        result, stats = answer.result, answer.result.stats
        return {
            "done": True,
            "done_reason": result.finish_reason,
            **self._durations(),
            "prompt_eval_count": result.prompt_tokens,
            "prompt_eval_duration": _nanoseconds(stats.prefill_seconds),
            "eval_count": len(result.token_ids),
            "eval_duration": _nanoseconds(stats.decode_seconds),
            "speculation": speculation_of([answer]),
        }

    def _durations(self) -> dict[str, int]:
        """Loading counts until the answer was begun."""
        return {
            "total_duration": time.perf_counter_ns() - self._started,
            "load_duration": self._begun - self._started,
        }


def _nanoseconds(seconds: float) -> int:
    return max(1, round(seconds * 1e9))


def _calls(calls: Sequence[Mapping[str, Any]], first: int) -> tuple[list[Any], str]:
    """Calls in Ollama's form, numbered from `first`, and a text of those whose arguments are no JSON object."""
    told, broken = list[Any](), ""
    for index, call in enumerate(calls, first):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        try:
            function = {"index": index, "name": name, "arguments": load_object(arguments or "{}")}
        except (ValueError, RecursionError):
            broken += f'{{"name": {json.dumps(name)}, "arguments": {arguments}'
            continue
        told.append({"id": call["id"], "function": function})
    return told, broken


# Routes


async def embed(serving: Serving, caller: Caller, request: Request) -> Response:
    """The vectors of some texts."""
    started = time.perf_counter_ns()
    said = await _read(serving, caller, request, EMBED)
    texts = [said["input"]] if isinstance(said.get("input"), str) else said.get("input", [])
    texts = [] if texts == [""] else texts
    vectors = await _vectors(serving, caller, request, said, texts)
    told = {
        "model": said["model"],
        "embeddings": vectors,
        "total_duration": time.perf_counter_ns() - started,
        "load_duration": 0,
        "prompt_eval_count": _num_words(texts),
    }
    return JSONResponse(told)


async def embeddings(serving: Serving, caller: Caller, request: Request) -> Response:
    """The vector of a text: what `/api/embed` replaces."""
    said = await _read(serving, caller, request, EMBEDDINGS)
    texts = [said["prompt"]] if said.get("prompt") else []
    (vector,) = await _vectors(serving, caller, request, said, texts) or [[]]
    return JSONResponse({"embedding": vector})


async def _read(serving: Serving, caller: Caller, request: Request, keys: Keys) -> dict[str, Any]:
    serving.rates.take_request(caller)
    most = serving.limits.max_body_bytes or MOST_BODY_BYTES
    said, num_ignored = await read_body(request, serving, lambda raw: _said(parsed(raw), keys), most)
    serving.num_ignored += num_ignored
    return said


async def _vectors(
    serving: Serving, caller: Caller, request: Request, said: Mapping[str, Any], texts: Sequence[str]
) -> list[Any]:
    """Vectors of texts, which are cut to what an embedder reads unless `truncate` is off."""
    cache = serving.cache_of(said["model"])
    if not texts:
        return []
    if said.get("truncate", True):
        texts = [text[:MOST_CHARACTERS] for text in texts]
    with serving.taken(caller.name):
        work = serving.prepared(partial(vectors_of, cache, texts, said.get("dimensions")))
        vectors = [vector.tolist() for vector in await unless_gone(request, serving.limits, work)]
    serving.take_prompt(caller, _num_words(texts))
    return vectors


def _num_words(texts: Sequence[str]) -> int:
    return sum(len(text.split()) for text in texts)


async def version(serving: Serving, caller: Caller, request: Request) -> Response:
    """The version of Ollama whose interface this is."""
    return JSONResponse({"version": VERSION})


def refusing(path: str, instead: str) -> Route:
    """A route that Ollama has and this server does not."""

    async def refuse(serving: Serving, caller: Caller, request: Request) -> Response:
        """Refuse by name."""
        raise ApiError(f"{path} is not supported: {instead}")

    return refuse


chat = answering(chat_asked, "messages")
generate = answering(generate_asked, "prompt")
