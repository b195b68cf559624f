"""Ollama's interface: what its clients send and read, whole and in lines, and nothing of another dialect."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from helpers.standard_answers import THINK, answer, thinking_tokenizer

from precedent_server.keys import KeyFile, add_key
from precedent_server.ollama import ELSEWHERE, chat_asked
from precedent_server.settings import ServerLimits
from precedent_testing.scripted_model import scripted_tokenizer

CHAT, GENERATE, EMBED = "/api/chat", "/api/generate", "/api/embed"
CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "10 €"}}\n</tool_call>'
PARAMETERS = {"type": "object", "properties": {"number": {"type": "string"}}, "required": ["number"]}
TOOL: Any = {"type": "function", "function": {"name": "look_up", "parameters": PARAMETERS}}
CALLED = {"index": 0, "name": "look_up", "arguments": {"number": "10 €"}}
ADA = '{"name": "Ada", "born": 1815}'
PERSON = {"type": "object", "properties": {"name": {"type": "string"}, "born": {"type": "integer"}}}
DURATIONS = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")
GREEDY = {"temperature": 0}


def user(text: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": text}]


async def asked(client: Any, path: str, **more: Any) -> dict[str, Any]:
    """The object of a whole answer."""
    told = await client.post(path, json={"model": "scripted", "stream": False, "options": GREEDY, **more})
    assert told.status_code == 200, told.text
    found: dict[str, Any] = told.json()
    return found


async def lines(client: Any, path: str, **more: Any) -> list[dict[str, Any]]:
    """The objects of a stream, which is what a body without `stream` asks for."""
    told = await client.post(path, json={"model": "scripted", "options": GREEDY, **more})
    assert (told.status_code, told.headers["content-type"]) == (200, "application/x-ndjson"), told.text
    assert told.text.endswith("}\n")
    return [json.loads(line) for line in told.text.splitlines()]


@pytest.mark.parametrize(
    ("path", "body", "text_of"),
    [
        (CHAT, {"messages": user("Guten Tag, Zoë!")}, lambda told: told["message"]["content"]),
        (GENERATE, {"prompt": "Guten Tag, Zoë!", "system": "Be kind."}, lambda told: told["response"]),
        (GENERATE, {"prompt": "Guten Tag, Zoë!", "raw": True}, lambda told: told["response"].removeprefix(" ")),
    ],
    ids=["chat", "generate", "raw"],
)
async def test_an_answer_is_the_same_whole_and_in_lines(client: Any, path: str, body: Any, text_of: Any) -> None:
    whole, told = await asked(client, path, **body), await lines(client, path, **body)
    assert text_of(whole) == "".join(map(text_of, told)) == "Guten Tag, Zoë!"
    assert [one["done"] for one in told] == [False] * (len(told) - 1) + [True]
    for end in (whole, told[-1]):
        assert (end["model"], end["done"], end["done_reason"]) == ("scripted", True, "stop")
        assert end["created_at"].endswith("Z")
        assert all(isinstance(end[name], int) and end[name] > 0 for name in DURATIONS)
        assert end["total_duration"] >= max(end["load_duration"], end["prompt_eval_duration"] + end["eval_duration"])
        decoding = end["speculation"]["latency_microseconds"]["request_decode_time"]  # the first step too
        assert abs(end["eval_duration"] / 1000 - decoding) <= 1
        assert end["eval_count"] == whole["eval_count"] > 1
        assert end["prompt_eval_count"] > 1
    assert not {"id", "object", "choices", "usage"} & {*whole, *told[0], *told[-1]}
    if path == CHAT:
        assert all(one["message"]["role"] == "assistant" for one in (whole, *told))


async def test_a_call_comes_whole_and_goes_back_without_an_id(client: Any) -> None:
    said = f"Let me see.{CALL}\n{CALL}"
    whole = await asked(client, CHAT, messages=user(said), tools=[TOOL])
    told = await lines(client, CHAT, messages=user(said), tools=[TOOL])
    calls = [call for one in told for call in one["message"].get("tool_calls", ())]
    for found in (whole["message"]["tool_calls"], calls):
        assert [call["function"] for call in found] == [CALLED, CALLED | {"index": 1}]
    assert whole["message"]["content"] == "".join(one["message"]["content"] for one in told) == "Let me see."
    assert (whole["done_reason"], told[-1]["done_reason"]) == ("stop", "stop")
    turn = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look_up", "arguments": {}}}]}
    result = {"role": "tool", "content": "sent on Monday", "tool_name": "look_up"}
    after = await asked(client, CHAT, messages=[*user(CALL), turn, result], tools=[TOOL])
    assert "sent on Monday" in after["message"]["content"]


async def test_a_call_that_the_limit_cuts_or_that_is_broken_is_text(serve: Any) -> None:
    options = {**GREEDY, "num_predict": 20}
    client = serve(lambda prompt: CALL)
    told = await lines(client, CHAT, messages=user("?"), tools=[TOOL], options=options)
    assert told[-1]["done_reason"] == "length"
    assert "".join(one["message"]["content"] for one in told).startswith("<tool_call>")
    broken = serve(lambda prompt: '<tool_call>\n{"name": "look_up", "arguments": {"number": 1 2}}\n</tool_call>')
    for one in (await asked(broken, CHAT, messages=user("?"), tools=[TOOL]), *(
        await lines(broken, CHAT, messages=user("?"), tools=[TOOL])
    )):  # fmt: skip
        assert "tool_calls" not in one["message"]


@pytest.mark.parametrize("wanted", ["json", PERSON, {}])
@pytest.mark.parametrize(("path", "body"), [(CHAT, {"messages": user(ADA)}), (GENERATE, {"prompt": ADA})])
async def test_a_format_is_enforced(serve: Any, wanted: Any, path: str, body: Any) -> None:
    for script, holds in ((lambda prompt: ADA, True), (lambda prompt: "Ada.", False)):
        client = serve(script, may_stray=True)
        told = await asked(client, path, format=wanted, **body)
        text = told["message"]["content"] if path == CHAT else told["response"]
        assert (text == ADA) if holds else not text.startswith("Ada.")


async def test_thoughts(serve: Any) -> None:
    client = serve(answer, tokenizer=thinking_tokenizer())
    for think in (True, "high", False, None):
        whole = await asked(client, CHAT, messages=user(THINK), think=think)
        assert whole["message"]["thinking"] == "Is it a bun?", "its template has no switch"
        assert whole["message"]["content"].startswith("one, two")
    told = await lines(client, GENERATE, prompt=THINK, think=True)
    assert "".join(one.get("thinking", "") for one in told) == "Is it a bun?"
    assert "".join(one["response"] for one in told).startswith("one, two")
    turn = {"role": "assistant", "content": "Yes.", "thinking": "Is it?"}
    assert (await asked(client, CHAT, messages=[*user("?"), turn, *user("?")]))["done"]


@pytest.mark.parametrize(("think", "shown"), [(True, "[True]"), ("low", "[True]"), (False, "[False]"), (None, "[]")])
async def test_a_template_with_a_switch_is_told_whether_to_think(serve: Any, think: Any, shown: str) -> None:
    tokenizer, prompts = copy.deepcopy(scripted_tokenizer()), list[str]()
    tokenizer.chat_template = "[{{ enable_thinking }}]" + tokenizer.chat_template
    client = serve(lambda prompt: prompts.append(prompt) or "x", tokenizer=tokenizer)  # type: ignore[func-returns-value]
    await asked(client, CHAT, messages=user("hi"), think=think)
    assert prompts[0].startswith(shown)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"num_predict": 2}, "length"), ({"num_predict": -1}, "stop"), ({"num_predict": -2}, "stop"), ({}, "stop"),
     ({"num_predict": 10**30}, "stop"), ({"num_predict": 100.0, "top_k": 40.0, "seed": 7}, "stop")],
)  # fmt: skip
@pytest.mark.parametrize("body", [{"prompt": "one two three"}, {"prompt": "one two three", "raw": True}])
async def test_how_long_an_answer_may_be(client: Any, options: Any, reason: str, body: Any) -> None:
    told = await asked(client, GENERATE, options={**GREEDY, **options}, **body)
    assert told["done_reason"] == reason
    assert (told["eval_count"] == 2) == (reason == "length")


async def test_options_in_force(client: Any) -> None:
    told = await asked(client, CHAT, messages=user("one two three"), options={**GREEDY, "stop": ["three"]})
    assert (told["message"]["content"], told["done_reason"]) == ("one two ", "stop")
    sampled = {"seed": -1, "top_k": -1, "top_p": 0.9, "min_p": 0.0, "temperature": 0.7, "repeat_penalty": 1.0}
    assert await asked(client, CHAT, messages=user("hi"), options={**sampled, "stop": [], "presence_penalty": None})


async def test_what_ollama_ignores_is_ignored_and_counted(client: Any) -> None:
    before = client.serving.num_ignored
    others = {"num_ctx": 10**9, "mirostat": "x", "num_gpu": 99, "no_option": {}}
    message = {**user("hi")[0], "name": "Ada", "images": []}
    await asked(client, CHAT, messages=[message], options={**GREEDY, **others}, user="Ada", tool_choice="none")
    await asked(client, GENERATE, prompt="hi", context=[], shift=True)
    assert client.serving.num_ignored - before == 4 + 1 + 2 + 1


async def test_log_probabilities(client: Any) -> None:
    more = {"messages": user("Hello there."), "logprobs": True, "top_logprobs": 2}
    whole, told = await asked(client, CHAT, **more), await lines(client, CHAT, **more)
    written = [one for each in told for one in each.get("logprobs", ())]
    assert [one["token"] for one in written] == [one["token"] for one in whole["logprobs"]]
    assert len(whole["logprobs"]) == whole["eval_count"]
    assert all(len(one["top_logprobs"]) == 2 for one in written)
    raw = await asked(client, GENERATE, prompt="Hello", raw=True, logprobs=True)
    assert len(raw["logprobs"]) == raw["eval_count"]


@pytest.mark.parametrize(("path", "body"), [(CHAT, {}), (CHAT, {"messages": []}), (GENERATE, {"prompt": ""})])
@pytest.mark.parametrize(("keep_alive", "reason"), [("5m", "load"), (None, "load")])
async def test_nothing_asked_is_a_load(client: Any, path: str, body: Any, keep_alive: Any, reason: str) -> None:
    told = (await client.post(path, json={"model": "scripted", "keep_alive": keep_alive, **body})).json()
    assert (told["done"], told["done_reason"]) == (True, reason)
    assert told["total_duration"] >= told["load_duration"] > 0
    assert told.get("response", told.get("message")) in ("", {"role": "assistant", "content": ""})


@pytest.mark.parametrize(
    ("given", "seconds"),
    [("5m", 300.0), ("1h30m", 5400.0), ("1.5s", 1.5), ("250ms", 0.25), (300, 300.0), (0, 0.0), ("0", 0.0), ("-0", 0.0),
     (-1, math.inf), ("-1s", math.inf), (10**300, math.inf), ("9" * 90 + "h", math.inf), (None, None)],
)  # fmt: skip
def test_how_long_a_model_stays(given: Any, seconds: float | None) -> None:
    for messages in (user("hi"), []):
        body = {"model": "scripted", "messages": messages, "keep_alive": given}
        assert chat_asked(body, ServerLimits()).keep_alive == seconds


@pytest.mark.parametrize(("role", "may"), [("use", False), ("admin", True)])
async def test_only_who_administers_unloads_a_model(serve: Any, tmp_path: Path, role: Any, may: bool) -> None:
    """All callers share a model: others can take it from nobody, and have it kept for nobody."""
    key = add_key(tmp_path / "keys.json", "desk", "shop", role)
    client = serve(lambda prompt: "x", keys=KeyFile(tmp_path / "keys.json"))
    (entry,) = client.serving.models.entries
    headers = {"Authorization": f"Bearer {key}"}
    for given in (0, 7):
        body = {"model": "scripted", "messages": user("hi"), "keep_alive": given}
        assert (await client.post(CHAT, json=body, headers=headers)).status_code == 200
    assert entry.instance.keep_alive == (7 if may else math.inf)
    refused = await client.post(CHAT, json={"model": "scripted", "keep_alive": 0}, headers=headers)
    assert (refused.status_code, "error" in refused.json()) == ((200, False) if may else (403, True))


async def test_names_with_and_without_the_latest_tag(client: Any) -> None:
    assert (await asked(client, CHAT, model="scripted:latest", messages=user("hi")))["model"] == "scripted:latest"
    assert (await client.post(CHAT, json={"model": "scripted:7b"})).status_code == 404


async def test_embeddings(client: Any) -> None:
    long = "word " * 100_000
    found = await asked(client, EMBED, input=["one two", long])
    assert (len(found["embeddings"]), found["model"]) == (2, "scripted")
    assert found["prompt_eval_count"] > 2
    (alone,) = (await asked(client, EMBED, input="one two"))["embeddings"]
    assert alone == found["embeddings"][0]
    assert sum(number * number for number in alone) == pytest.approx(1)
    assert (await asked(client, "/api/embeddings", prompt="one two")) == {"embedding": alone}
    assert (await asked(client, EMBED, input=[]))["embeddings"] == []
    assert (await asked(client, "/api/embeddings", prompt="")) == {"embedding": []}


async def test_what_clients_look_for_first(client: Any) -> None:
    assert [int(part) >= 0 for part in (await client.get("/api/version")).json()["version"].split(".")] == [True] * 3
    assert (await client.head("/")).status_code == 200


HI = {"messages": user("hi")}
REFUSED: list[tuple[str, Any, int, str]] = [
    (CHAT, HI | {"model": "gpt"}, 404, "model 'gpt' not found"),
    (CHAT, {"model": "gpt"}, 404, "model 'gpt' not found"),
    (EMBED, {"model": "gpt", "input": "x"}, 404, "model 'gpt' not found"),
    (CHAT, HI | {"model": None}, 400, "model is missing"),
    (CHAT, HI | {"model": 7}, 400, "model"),
    (CHAT, HI | {"stream": 1}, 400, "stream"),
    (CHAT, HI | {"format": "yaml"}, 400, "format"),
    (CHAT, HI | {"think": "much"}, 400, "think: Input should be a valid boolean or 'low', 'medium' or 'high'"),
    (CHAT, HI | {"think": True}, 400, "'scripted' does not support thinking"),
    (CHAT, HI | {"top_logprobs": 21, "logprobs": True}, 400, "top_logprobs"),
    (CHAT, HI | {"tools": [{"type": "web"}]}, 400, "tool of type 'web'"),
    (CHAT, {"messages": [{"role": "narrator", "content": "x"}]}, 400, "messages[0].role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, 400, "messages[0]"),
    (CHAT, {"messages": [{"role": "user", "content": "x", "images": ["eA=="]}]}, 400, "messages[0].images is not"),
    (CHAT, {"messages": user("x" * 20_000)}, 400, "context"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": ["x"]}]}, 400, "messages[0]"),
    (GENERATE, {"prompt": "x", "suffix": "y"}, 400, "suffix is not supported"),
    (GENERATE, {"prompt": "x", "template": "{{ .Prompt }}"}, 400, "template is not supported"),
    (GENERATE, {"prompt": "x", "context": [1, 2]}, 400, "context is not supported: send the conversation to /api/chat"),
    (GENERATE, {"prompt": "x", "images": ["eA=="]}, 400, "images is not supported"),
    (GENERATE, {"prompt": "x", "raw": True, "system": "y"}, 400, "raw mode does not support"),
    (GENERATE, {"prompt": "x", "raw": True, "format": "json"}, 400, "format is not supported with raw"),
    (EMBED, {"input": ["x", 1]}, 400, "input"),
    (EMBED, {"input": ["x"] * 257}, 400, "256 texts"),
    (EMBED, {"input": "x" * 32_769, "truncate": False}, 400, "more than 32768 characters"),
    (EMBED, {"input": "x", "dimensions": 3}, 400, "dimensions"),
    *((CHAT, HI | {"keep_alive": given}, 400, "keep_alive") for given in ("soon", "5", "1h " * 99, True, [])),
    *((CHAT, HI | {"options": {name: value}}, 400, name) for name, value in {
        "temperature": "hot", "top_k": 1.5, "top_p": 2, "repeat_penalty": 0, "seed": True, "num_predict": "x",
        "stop": [1],
    }.items()),
    (CHAT, HI | {"options": []}, 400, "options"),
]  # fmt: skip


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body", "status", "said"), REFUSED)
@pytest.mark.sampled(2)
async def test_refusals_in_ollamas_form(
    client: Any, path: str, body: Any, status: int, said: str, stream: bool
) -> None:
    told = await client.post(path, json={"model": "scripted", "stream": stream, **body})
    assert (told.status_code, list(told.json())) == (status, ["error"]), told.text
    assert said in told.json()["error"]


@pytest.mark.parametrize("path", ELSEWHERE)
async def test_routes_that_are_ollamas_alone_are_refused_by_name(client: Any, path: str) -> None:
    told = await client.request(ELSEWHERE[path][0], path, json={"model": "scripted"})
    assert told.status_code == 400
    assert told.json()["error"].startswith(f"{path} is not supported: ")


async def test_errors_of_http_in_ollamas_form(serve: Any, path: Path) -> None:
    add_key(path, "desk", "shop")
    guarded = serve(["x"], keys=KeyFile(path))
    client = serve(["x"], limits=ServerLimits(max_queued=1))
    body = {"model": "scripted", **HI}
    with client.serving.places.held("local", 1):
        busy = await client.post(CHAT, json=body)
    found = {
        401: await guarded.post(CHAT, json=body),
        404: await client.get("/api/nothing"),
        405: await client.get(CHAT),
        400: await client.post(CHAT, content=b"{"),
        413: await client.post(CHAT, content=b" " * 10_000_000),
        429: busy,
    }
    client.serving.closed = True
    found[503] = await client.post(CHAT, json=body)
    assert {status: (told.status_code, list(told.json())) for status, told in found.items()} == {
        status: (status, ["error"]) for status in found
    }
    assert "retry-after" in found[429].headers


async def test_a_stream_that_fails_ends_with_an_error(serve: Any) -> None:
    def fails(*args: Any) -> Any:
        raise RuntimeError("injected")

    client = serve(lambda prompt: "x")
    client.serving.models["scripted"].engine.target.score = fails
    (told,) = await lines(client, CHAT, **HI)
    assert list(told) == ["error"]
    assert "injected" not in told["error"]
