"""A request's body on its way to vLLM: what the client may not say is taken out, a sealed note is put in."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from precedent.cache import tools_fingerprint
from precedent.text.query import recall_query
from precedent_server.errors import ApiError
from precedent_vllm.note import NAME, Note, seal
from precedent_vllm.settings import Settings

ANSWERED = ("/v1/chat/completions", "/v1/completions")
"""Routes whose answers come with token ids, and so can be stored."""

DRAFTED = (*ANSWERED, "/v1/responses", "/v1/messages")
"""Routes whose requests carry `vllm_xargs`."""

LAST_CHARACTERS = 600
"""Of a bare prompt, what recall's query is made from; of longer messages recall takes as many from the beginning."""

_ON = {"on": True, "off": False}


@dataclass(frozen=True, slots=True)
class Passed:
    """What goes on to vLLM.

    `stored` says as what the answer is to be stored, None if it is not; `shows_ids` if the client asked for token ids.
    """

    body: bytes
    stored: Note | None = None
    model: str = ""
    shows_ids: bool = False


def passed(raw: bytes, path: str, tenant: str | None, step: str, longest: int | None, settings: Settings) -> Passed:
    """Read a body and write the one for vLLM.

    `longest` bounds a prediction in characters. A body that vLLM will refuse anyway passes as it came. Raises ApiError.
    """
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return Passed(raw)
    arguments = body.get("vllm_xargs") if isinstance(body, dict) else False
    if not isinstance(arguments, dict | None):
        return Passed(raw)
    note = Note(
        on=_switch((arguments or {}).get(NAME, "on")),
        tenant=tenant,
        workflow_step=step,
        query=_query(body),
        tools=_tools(body.get("tools")),
        prediction=_prediction(body.pop("prediction", None), longest),
    )
    shows = body.get("return_token_ids") is True
    stores = path in ANSWERED and tenant is not None and note.on and settings.store is not None
    body |= {"vllm_xargs": {**(arguments or {}), NAME: seal(note, settings.secret)}}
    body |= {"return_token_ids": True} if stores else {}
    return Passed(json.dumps(body).encode(), note if stores else None, str(body.get("model", "")), shows)


def _switch(said: Any) -> bool:
    if not isinstance(said, str) or said not in _ON:
        raise ApiError(
            f"{NAME} in vllm_xargs must be 'on' or 'off': the API key says whose request it is", param="vllm_xargs"
        )
    return _ON[said]


def _prediction(said: Any, longest: int | None) -> str | None:
    """The text of OpenAI's `prediction`. Raises ApiError for what is none, and for one longer than the context."""
    if said is None:
        return None
    if not isinstance(said, dict) or said.get("type") != "content" or not isinstance(said.get("content"), str | list):
        raise ApiError("prediction must be {'type': 'content', 'content': a text}", param="prediction")
    text = _text(said["content"])
    if longest is not None and len(text) > longest:
        raise ApiError(
            f"prediction has {len(text)} characters, which no answer of this model can have", param="prediction"
        )
    return text or None


def _query(body: Mapping[str, Any]) -> str:
    """Recall's query; for ids or what nobody can read, none."""
    said = body.get("messages", body.get("input", body.get("prompt")))
    if isinstance(said, str):
        said = [{"role": "user", "content": said[-LAST_CHARACTERS:]}]
    return recall_query(list(_messages(said)))


def _messages(said: Any) -> Iterator[Mapping[str, Any]]:
    for one in said if isinstance(said, list) else ():
        if isinstance(one, dict) and isinstance(one.get("role"), str):
            calls = one.get("tool_calls")
            named = [call for call in calls if _is_call(call)] if isinstance(calls, list) else []
            yield {"role": one["role"], "content": _text(one.get("content")), "tool_calls": named}


def _is_call(call: Any) -> bool:
    function = call.get("function") if isinstance(call, dict) else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _text(content: Any) -> str:
    """The text of a message's content, whether one text or parts; half characters are replaced."""
    parts: Sequence[Any] = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    whole = "".join(text for text in texts if isinstance(text, str))
    return whole.encode("utf-8", "replace").decode()


def _tools(said: Any) -> str:
    return tools_fingerprint(said) if isinstance(said, list) and all(isinstance(one, dict) for one in said) else ""
