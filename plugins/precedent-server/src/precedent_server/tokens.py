"""`/tokenize`, `/detokenize` and `/tokenizer_info` in vLLM's form: texts and conversations as token ids, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypedDict

from langchain_core.messages import BaseMessage
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from precedent.errors import PrecedentError
from precedent.langchain.messages import to_template_messages
from precedent.langchain.tools import openai_tools
from precedent.runtime.plain_values import check_plain
from precedent.text.codec import check_length
from precedent.text.prompt import render_prompt
from precedent_server.bodies import Keys, Messages, checked, parsed, unsupported
from precedent_server.chat import check_bounds, check_tools
from precedent_server.errors import ApiError, api_error
from precedent_server.history import read_messages
from precedent_server.keys import Caller
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits
from precedent_server.transport import model_of, read_body, unless_gone


class TokenizeBody(TypedDict, total=False):
    """What `/tokenize` takes: a text, or a conversation with what its chat template is given."""

    model: str
    prompt: str
    messages: Messages
    tools: list[dict[str, Any]]
    add_generation_prompt: bool
    chat_template_kwargs: dict[str, Any]
    add_special_tokens: bool
    return_token_strs: bool


class DetokenizeBody(TypedDict, total=False):
    """What `/detokenize` takes."""

    model: str
    tokens: list[int]


class Tokens(BaseModel):
    """The tokens of a prompt."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class TokenizerInfo(BaseModel):
    """A tokenizer; several chat templates have names."""

    tokenizer_class: str
    bos_token: str | None
    eos_token: str | None
    pad_token: str | None
    unk_token: str | None
    chat_template: str | dict[str, str] | None


class Text(BaseModel):
    """The text of some tokens."""

    prompt: str


TOKENIZE = Keys(TokenizeBody, required=(), supported=tuple(TokenizeBody.__annotations__), own={})
DETOKENIZE = Keys(DetokenizeBody, required=("tokens",), supported=tuple(DetokenizeBody.__annotations__), own={})

_OF_CHATS = ("tools", "add_generation_prompt", "chat_template_kwargs")


async def tokenize(serving: Serving, caller: Caller, request: Request) -> Response:
    """The tokens of a text, or of the prompt of a conversation."""
    serving.rates.take_request(caller)
    said = await read_body(request, serving, lambda raw: _asked(parsed(raw), serving.limits))
    serving.num_ignored += said.pop("num_ignored", 0)
    return await _answered(serving, caller, request, said, _tokens)


async def detokenize(serving: Serving, caller: Caller, request: Request) -> Response:
    """The text of some tokens, special ones included."""
    serving.rates.take_request(caller)
    said = await read_body(request, serving, lambda raw: checked(parsed(raw), DETOKENIZE))
    return await _answered(serving, caller, request, said, _text)


async def _answered(serving: Serving, caller: Caller, request: Request, said: dict[str, Any], made: Any) -> Response:
    """The answer that `made` makes of a model and a body, off the event loop."""

    def answer() -> Response:
        try:
            return JSONResponse(made(served, said).model_dump())
        except PrecedentError as error:
            raise api_error(error, said, {"prompt": "messages" if "messages" in said else "prompt"}) from error

    with serving.taken(caller.name), serving.models.lease(_name(serving, said.get("model"))) as lease:
        served = await model_of(request, serving, lease)
        return await unless_gone(request, serving.limits, serving.prepared(answer))


async def tokenizer_info(serving: Serving, caller: Caller, request: Request) -> Response:
    """The special tokens and the chat template of a model's tokenizer."""
    name = _name(serving, request.query_params.get("model"))
    with serving.taken(caller.name), serving.models.lease(name) as lease:
        tokenizer = (await model_of(request, serving, lease)).engine.tokenizer
    told = {name: getattr(tokenizer, name, None) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
    info = TokenizerInfo(tokenizer_class=type(tokenizer).__name__, chat_template=tokenizer.chat_template, **told)
    return JSONResponse(info.model_dump())


def _name(serving: Serving, name: str | None) -> str:
    """The name of a model, which may be left out if there is only one."""
    if name is not None:
        return name
    names = serving.models.names or ()
    if len(names) != 1:
        raise ApiError("model is missing: several are served", param="model", code="missing_required_parameter")
    return names[0]


def _asked(body: Mapping[str, Any], limits: ServerLimits) -> dict[str, Any]:
    """A body of `/tokenize`, its messages read. Raises ApiError that names the key."""
    check_tools(body.get("tools"))
    said = checked(body, TOKENIZE)
    if ("prompt" in said) == ("messages" in said):
        raise ApiError("give prompt or messages, one of the two", param="prompt")
    if "prompt" in said:
        if wrong := [name for name in _OF_CHATS if name in said]:
            raise unsupported(f"{wrong[0]} is for messages: a prompt is encoded as it stands", wrong[0])
        return said
    if said.get("add_special_tokens"):
        raise unsupported("add_special_tokens is for a prompt: the chat template writes its own", "add_special_tokens")
    check_bounds(said, limits)
    try:
        messages, num_ignored = read_messages(said["messages"])
    except PrecedentError as error:
        raise api_error(error, said, {"prompt": "messages"}) from error
    return said | {"messages": messages, "num_ignored": num_ignored}


def _tokens(served: Served, said: Mapping[str, Any]) -> Tokens:
    engine = served.engine
    ids = _of_chat(served, said["messages"], said) if "messages" in said else _of_text(served, said)
    strings = list(engine.tokenizer.convert_ids_to_tokens(ids)) if said.get("return_token_strs") else None
    return Tokens(count=len(ids), max_model_len=engine.context_length, tokens=ids, token_strs=strings)


def _of_text(served: Served, said: Mapping[str, Any]) -> list[int]:
    tokenizer, text = served.engine.tokenizer, said["prompt"]
    check_plain("prompt", text)
    check_length(tokenizer, text, served.engine.context_length)
    return list(tokenizer.encode(text, add_special_tokens=said.get("add_special_tokens", True)))


def _of_chat(served: Served, messages: Sequence[BaseMessage], said: Mapping[str, Any]) -> list[int]:
    return render_prompt(
        served.engine.tokenizer,
        to_template_messages(messages),
        openai_tools(said.get("tools", ())),
        served.chat.template_settings(said),
        served.engine.context_length,
        add_generation_prompt=said.get("add_generation_prompt", True),
    )


def _text(served: Served, said: Mapping[str, Any]) -> Text:
    tokenizer, tokens = served.engine.tokenizer, said["tokens"]
    last = len(tokenizer) - 1
    if unknown := [token for token in tokens if not 0 <= token <= last]:
        raise ApiError(f"tokens holds {unknown[0]}, the tokenizer knows 0 to {last}", param="tokens")
    return Text(prompt=str(tokenizer.decode(tokens)))
