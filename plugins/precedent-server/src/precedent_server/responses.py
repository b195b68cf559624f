"""`POST /v1/responses`: a conversation in, its next items out, which a later request can continue.

A body is read by writing it as one of `/v1/chat/completions`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any, Literal

from openai.types.responses import Response as ResponseBody
from openai.types.responses.response_create_params import ResponseCreateParamsBase
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.responses import Response as HTTPResponse

from precedent.runtime.plain_values import shown
from precedent.sampling.logprobs import TokenLogprob
from precedent.text.answers import CallPiece, Piece
from precedent.text.tool_formats import ReasoningPiece
from precedent_server.answers import Answer, Asked, answering, logprobs_of, speculation_of, steps_of, usage_of
from precedent_server.bodies import Keys, checked, unsupported
from precedent_server.chat import chat_request
from precedent_server.errors import ApiError
from precedent_server.keys import Caller
from precedent_server.response_store import KeptResponse, ResponseStore
from precedent_server.serving import Served, Serving
from precedent_server.settings import ServerLimits
from precedent_server.usage import Owner

PREVIOUS = "previous_response_id"
"""The key that names the response to continue."""

KEYS = Keys(
    ResponseCreateParamsBase,
    required=("model", "input"),
    supported=(
        *("input", "instructions", "model", "max_output_tokens", "temperature", "top_p", "tools", "tool_choice"),
        *("parallel_tool_calls", "text", "reasoning", "truncation", "background", "include", "top_logprobs"),
        *("stream_options", PREVIOUS),
    ),
    own={
        **{"stream": bool, "input": str | list[Any], "tools": list[dict[str, Any]], "text": dict[str, Any]},
        **{"tool_choice": str | dict[str, Any], "include": list[str], "speculation": bool | dict[str, Any]},
    },
    instead={
        "conversation": "there are no stored conversations: send previous_response_id, or all of it as input",
        "prompt": "there are no stored prompts: send instructions and input",
        "max_tool_calls": "tools run at the client: count there",
    },
)

_NESTED = {"text": ("format", "verbosity"), "reasoning": ("effort", "summary", "generate_summary")}
"""Keys that may stand within others. A summary of the reasoning is never made: all of it is in the answer."""

_TEXT_OF = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""The key of a part's text, by the part's type."""

_ROLES = ("system", "developer", "user")
"""Who else than the assistant speaks in messages; tools answer in items of their own."""

_RUN_BY_PROVIDERS = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call"),
    *("mcp_call", "mcp_list_tools", "mcp_approval_request"),
)
"""Items that tell of tools which another provider ran; their results are in the texts."""

_CHAT_NAMES = {"messages": "input", "max_completion_tokens": "max_output_tokens", "response_format": "text"}
"""Keys of a chat completion, each with the one of this route that it was made of."""


_ECHOED: Mapping[str, Any] = {
    **{
        "model": None,
        "instructions": None,
        "max_output_tokens": None,
        "metadata": {},
        "temperature": 1.0,
        "top_p": 1.0,
        PREVIOUS: None,
        "store": True,
    },
    **{"parallel_tool_calls": True, "tool_choice": "auto", "tools": [], "text": {"format": {"type": "text"}}},
}
"""What an answer says again of its request, and what was not said."""


class DeletedResponse(BaseModel):
    """What a DELETE answers."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


def responses_request(store: ResponseStore, owner: Owner, body: Mapping[str, Any], limits: ServerLimits) -> Asked:
    """Read a parsed body of an owner. Raises ApiError that names the key of this route."""
    body = {name: value for name, value in body.items() if value is not None}
    said = checked(body, KEYS)
    if said.get("background"):
        raise ApiError("an answer is sent while it is written: leave background out", param="background")
    if unknown := set(said.get("include", ())) - {"message.output_text.logprobs", "reasoning.encrypted_content"}:
        raise unsupported(f"include={min(unknown)!r} is not supported", "include")
    for name, known in _NESTED.items():
        if unknown := said.get(name, {}).keys() - known:
            raise ApiError(f"{name}.{min(unknown)} is not supported; known: {known[0]}", param=name)
    if said.get("text", {}).get("verbosity", "medium") != "medium":
        raise ApiError("text.verbosity is not supported: say in the prompt how long the answer should be", param="text")
    same = ("model", "temperature", "top_p", "parallel_tool_calls", "stream", "speculation", "top_logprobs")
    chat = {name: said[name] for name in same if name in said}
    if "top_logprobs" in said or "message.output_text.logprobs" in said.get("include", ()):
        chat["logprobs"] = True
    if "max_output_tokens" in said:
        chat["max_completion_tokens"] = said["max_output_tokens"]
    if said.get("tools"):
        chat["tools"] = [_tool(tool) for tool in said["tools"]]
    if "tool_choice" in said:
        chat["tool_choice"] = _choice(said["tool_choice"])
    if effort := said.get("reasoning", {}).get("effort"):
        chat["reasoning_effort"] = effort
    if wanted := said.get("text", {}).get("format"):
        chat["response_format"] = _format(wanted)
    items = [{"role": "user", "content": said["input"]}] if isinstance(said["input"], str) else said["input"]
    system = [{"role": "system", "content": said["instructions"]}] if "instructions" in said else []
    num_foreign = sum(map(_is_foreign, items))
    num_cleared = store.num_cleared
    before = _stored(store, owner, said[PREVIOUS], PREVIOUS) if PREVIOUS in said else None
    written = cache(lambda: json.dumps(items).encode())

    def asked_after(earlier: Sequence[Any]) -> Asked:
        try:
            return chat_request({**chat, "messages": [*system, *_turns([*earlier, *items])]}, limits, _CHAT_NAMES)
        except ApiError as error:
            error.error.param = _CHAT_NAMES.get(error.error.param or "", error.error.param)
            raise

    def begin(served: Served, tenant: str, index: int) -> Answer:
        """What is kept may be long, and is read where prompts are prepared."""
        if keeps:
            store.follow(served.engine.cache)
            written()
        if before is None:
            return asked.begin(served, tenant, index)
        earlier = [item for part in before.conversation for item in json.loads(part)]
        return asked_after(earlier).begin(served, tenant, index)

    def keep(response: Mapping[str, Any]) -> None:
        conversation = (*(before.conversation if before else ()), written(), json.dumps(response["output"]).encode())
        kept = KeptResponse(json.dumps(response).encode(), conversation)
        store.keep(owner, response["id"], kept, num_cleared)

    asked, keeps = asked_after(()), body.get("store", True)
    return replace(
        asked,
        begin=begin,
        num_ignored=asked.num_ignored + num_foreign,
        write=lambda answers: ResponseWriter(body, answers[0], keep if keeps else None),
    )


def _stored(store: ResponseStore, owner: Owner, name: str, param: str | None = None) -> KeptResponse:
    """An owner's response. Raises ApiError (404) for one that is not kept, `param` being the key that names it."""
    found = store.get(owner, name)
    if found is None:
        raise _not_found(name, param)
    return found


def _not_found(name: str, param: str | None = None) -> ApiError:
    message = f"response {shown(name)} is not found: it is another key's, was not stored, or not used for too long"
    return ApiError(message, status=404, param=param, code=None if param is None else "previous_response_not_found")


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ApiError(f"a tool of type {tool.get('type')!r} is not supported: use functions", param="tools")
    return {"type": "function", "function": {name: part for name, part in tool.items() if name != "type"}}


def _choice(choice: Any) -> Any:
    if not isinstance(choice, Mapping):
        return choice
    if choice.get("type") == "allowed_tools":
        tools = [_tool(tool) for tool in choice.get("tools") or () if isinstance(tool, Mapping)]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}
    if choice.get("type") != "function":
        raise ApiError(f"tool_choice of type {choice.get('type')!r} is not supported", param="tool_choice")
    return {"type": "function", "function": {"name": choice.get("name")}}


def _format(wanted: Any) -> Any:
    """The format in a chat completion's words, which nest a schema one level deeper."""
    if isinstance(wanted, Mapping) and wanted.get("type") == "json_schema":
        return {
            "type": "json_schema",
            "json_schema": {name: part for name, part in wanted.items() if name != "type"},
        }
    return wanted


def _is_foreign(item: Any) -> bool:
    return isinstance(item, Mapping) and item.get("type") in _RUN_BY_PROVIDERS


def _turns(items: Sequence[Any]) -> Iterator[dict[str, Any]]:
    """The input's items as messages: calls that follow each other belong to one assistant's turn."""
    turn: dict[str, Any] | None = None
    for position, item in enumerate(items):
        if _is_foreign(item):
            continue
        if not isinstance(item, Mapping):
            raise ApiError(f"input[{position}] must be an object", param="input")
        kind = item.get("type", "message")
        if kind in ("function_call", "reasoning") or (kind == "message" and item.get("role") == "assistant"):
            turn = turn or {"role": "assistant", "content": ""}
            _add(turn, item, kind)
            continue
        if turn is not None:
            yield turn
            turn = None
        if kind == "function_call_output":
            content = _content(item.get("output"))
            yield {"role": "tool", "tool_call_id": item.get("call_id"), "content": content}
        elif kind == "message" and item.get("role") not in _ROLES:
            raise ApiError(f"input[{position}].role must be one of assistant, {', '.join(_ROLES)}", param="input")
        elif kind == "message":
            yield {"role": item["role"], "content": _content(item.get("content"))}
        else:
            raise ApiError(f"input[{position}] of type {kind!r} is not supported", param="input")
    if turn is not None:
        yield turn


def _add(turn: dict[str, Any], item: Mapping[str, Any], kind: Any) -> None:
    """Add a call, a thought or a text to an assistant's turn."""
    if kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        turn.setdefault("tool_calls", []).append({"id": item.get("call_id"), "type": "function", "function": function})
    elif kind == "reasoning":
        said = "".join(str(part.get("text", "")) for part in item.get("content") or () if isinstance(part, Mapping))
        if said:
            turn["reasoning_content"] = turn.get("reasoning_content", "") + said
    else:
        content = _content(item.get("content") or "")
        turn["content"] += content if isinstance(content, str) else "".join(part["text"] for part in content)


def _content(content: Any) -> Any:
    """Parts in a chat completion's words; anything else is for its checks to refuse."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get(_TEXT_OF[kind]) if isinstance(kind, str) and kind in _TEXT_OF else None
        if not isinstance(text, str):
            raise ApiError(f"a part of type {kind!r} is not supported: only text is read", param="input")
        parts.append({"type": "text", "text": text})
    return parts


class ResponseWriter:
    """Writes an answer as OpenAI's Response: its items, whole or as the events of a stream."""

    def __init__(
        self, body: Mapping[str, Any], answer: Answer, keep: Callable[[Mapping[str, Any]], None] | None
    ) -> None:
        self._answer, self._body, self._keep = answer, body, keep
        self._id, self._created = f"resp_{secrets.token_hex(16)}", int(time.time())
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None
        self._in_whole_call = False
        self._number = -1
        self._untold: list[TokenLogprob] = []

    def whole(self) -> dict[str, Any]:
        """The response of an answer that was read to its end."""
        answer = self._answer
        if answer.reasoning:
            self._begin_item("reasoning")["content"] = [{"type": "reasoning_text", "text": answer.reasoning}]
        if answer.text or not answer.calls:
            self._begin_item("message")["content"] = [self._text_part(answer.text, answer.result.logprobs)]
        for call in answer.calls:
            self._begin_item("function_call").update(call_id=call["id"], **call["function"])
        for item in self._items:
            item["status"] = "completed"
        if self._items[-1]["type"] != "function_call":  # calls of a whole answer are complete
            self._items[-1]["status"] = self._status
        return self._ended()

    async def events(self) -> AsyncGenerator[str, None]:
        """The events of a stream."""
        begun = self._response("in_progress")
        yield self._event("response.created", response=begun) + self._event("response.in_progress", response=begun)
        async for _, emission, pieces in steps_of([self._answer]):
            self._untold += emission.logprobs
            if written := "".join(event for piece in pieces for event in self._piece(piece)):
                yield written
        closing = ""
        if all(item["type"] == "reasoning" for item in self._items):
            closing = "".join((*self._close(), *self._begin("message")))
        closing += "".join(self._close("completed" if self._in_whole_call else self._status))
        ended = "response.completed" if self._status == "completed" else "response.incomplete"
        yield closing + self._event(ended, response=self._ended())

    def failed(self, error: ApiError) -> str:
        """The event that ends a stream which failed."""
        told = error.body()["error"]
        return self._event("error", **{name: told[name] for name in ("code", "message", "param")})

    def _piece(self, piece: Piece) -> Iterator[str]:
        if isinstance(piece, CallPiece):
            yield from self._call(piece)
            return
        kind = "reasoning" if isinstance(piece, ReasoningPiece) else "message"
        if self._open is None or self._open["type"] != kind:
            yield from self._close()
            yield from self._begin(kind)
            self._in_whole_call = False
        assert self._open is not None
        self._open["content"][0]["text"] += piece.text
        if kind == "reasoning":
            yield self._in_item("response.reasoning_text.delta", content_index=0, delta=piece.text)
        else:
            told = self._logprobs(self._untold)
            self._untold.clear()
            self._open["content"][0]["logprobs"] += told
            yield self._in_item("response.output_text.delta", content_index=0, delta=piece.text, logprobs=told)

    def _call(self, piece: CallPiece) -> Iterator[str]:
        if piece.call_id is not None:
            yield from self._close()
            self._open, self._in_whole_call = self._begin_item("function_call"), True
            self._open.update(call_id=piece.call_id, name=piece.name, arguments="")
            yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._open)
            return
        assert self._open is not None
        if piece.cut:
            self._in_whole_call = False
            return
        self._open["arguments"] += piece.arguments
        yield self._in_item("response.function_call_arguments.delta", delta=piece.arguments)

    def _begin(self, kind: str) -> Iterator[str]:
        """Begin an item of text."""
        self._open = self._begin_item(kind)
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=self._open)
        part = self._text_part("") if kind == "message" else {"type": "reasoning_text", "text": ""}
        self._open["content"] = [part]
        if kind == "message":
            yield self._in_item("response.content_part.added", content_index=0, part=part)

    def _close(self, status: str = "completed") -> Iterator[str]:
        """End the item that is open."""
        if self._open is None:
            return
        item = self._open
        item["status"] = status
        if item["type"] == "function_call":
            arguments, name = item["arguments"], item["name"]
            yield self._in_item("response.function_call_arguments.done", arguments=arguments, name=name)
        elif item["type"] == "message":
            part = item["content"][0]
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            yield self._in_item("response.output_text.done", content_index=0, **told)
            yield self._in_item("response.content_part.done", content_index=0, part=part)
        else:
            text = item["content"][0]["text"]
            yield self._in_item("response.reasoning_text.done", content_index=0, text=text)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._open = None

    def _begin_item(self, kind: str) -> dict[str, Any]:
        prefix = {"message": "msg", "function_call": "fc", "reasoning": "rs"}[kind]
        item: dict[str, Any] = {"id": f"{prefix}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress"}
        if kind == "message":
            item |= {"role": "assistant", "content": []}
        elif kind == "reasoning":
            item |= {"summary": [], "content": []}
        self._items.append(item)
        return item

    def _text_part(self, text: str, logprobs: Any = ()) -> dict[str, Any]:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": self._logprobs(logprobs)}

    def _logprobs(self, told: Sequence[TokenLogprob]) -> list[Any]:
        found = logprobs_of(self._answer, told)
        return [] if found is None else list(found["content"])

    @property
    def _status(self) -> str:
        return "incomplete" if self._answer.finish_reason == "length" else "completed"

    def _ended(self) -> dict[str, Any]:
        """The whole response, which is kept now."""
        response = self._response(self._status)
        if self._keep is not None:
            self._keep(response)
        return response

    def _response(self, status: str) -> dict[str, Any]:
        told: dict[str, Any] = {
            **{"id": self._id, "object": "response", "created_at": self._created, "status": status},
            **{name: self._body.get(name, usual) for name, usual in _ECHOED.items()},
            **{"output": self._items, "error": None, "incomplete_details": None, "usage": None},
        }
        if status != "in_progress":
            told |= {"usage": self._usage(), "speculation": speculation_of([self._answer])}
        if status == "incomplete":
            told["incomplete_details"] = {"reason": "max_output_tokens"}
        return ResponseBody.construct(**told).model_dump(mode="json", exclude_unset=True, warnings=False)

    def _usage(self) -> dict[str, Any]:
        found = usage_of([self._answer])
        cached = self._answer.result.cached_prompt_tokens
        return {
            "input_tokens": found.prompt_tokens,
            "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
            "output_tokens": found.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._answer.num_reasoning_tokens},
            "total_tokens": found.total_tokens,
        }

    def _in_item(self, kind: str, **told: Any) -> str:
        return self._event(kind, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **told)

    def _event(self, kind: str, **told: Any) -> str:
        self._number += 1
        data = {"type": kind, "sequence_number": self._number, **told}
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"


async def responses(serving: Serving, caller: Caller, request: Request) -> HTTPResponse:
    """Answer one request, whole or as a stream."""
    read = partial(responses_request, serving.response_store, _owner(caller))
    return await answering(read, "input")(serving, caller, request)


async def stored_response(serving: Serving, caller: Caller, request: Request) -> HTTPResponse:
    """A response that is kept, as it was answered."""
    if request.query_params.get("stream", "false").lower() != "false":
        raise unsupported("stream is not supported: the whole response is sent", "stream")
    found = _stored(serving.response_store, _owner(caller), request.path_params["id"])
    return HTTPResponse(found.body, media_type="application/json")


async def delete_response(serving: Serving, caller: Caller, request: Request) -> HTTPResponse:
    """Forget a response; later ones that continue it keep the conversation."""
    name = request.path_params["id"]
    if not serving.response_store.drop(_owner(caller), name):
        raise _not_found(name)
    return JSONResponse(DeletedResponse(id=name).model_dump())


def _owner(caller: Caller) -> Owner:
    return caller.name, caller.tenant
