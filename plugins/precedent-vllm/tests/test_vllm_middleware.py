"""The middleware of vLLM's HTTP server: who asks, what reaches the workers, what comes back, what is stored."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from helpers.vllm_fakes import ANSWER, ASK, PROMPT, SECRET, FakeServer, Wrap, asked, closed, kept, noted
from hypothesis import given
from hypothesis import strategies as st

from precedent_testing.embedders import HashEmbedder
from precedent_vllm.answers import Events, Gathered
from precedent_vllm.counts import written_to
from precedent_vllm.keeper import Keeper
from precedent_vllm.note import MAX_CHARACTERS, Note
from precedent_vllm.settings import Settings


async def test_the_key_says_tenant_and_workflow_step(wrap: Wrap, keys: dict[str, str], tmp_path: Path) -> None:
    app, server = wrap(api_keys=tmp_path / "keys.json")
    for name, tenant in (("desk", "north"), ("lab", "south")):
        answer = await asked(app, ASK, key=keys[name], state=server.state)
        assert answer.status == 200
        note = noted(server)
        assert (note.tenant, note.workflow_step, note.query, note.on) == (tenant, name, "user: Where is order ?", True)
    closed(app)
    assert kept(tmp_path) == [("north", tuple(ANSWER)), ("south", tuple(ANSWER))]


HOSTILE: list[Any] = [
    {"tenant": "south"},
    {"precedent_tenant": "south", "seal": "x"},
    {"other": "x" * 3_000_000},
    {"session_id": "1", "kv": [1, 2.5, "x"]},
]


@pytest.mark.parametrize("xargs", HOSTILE, ids=range(len(HOSTILE)))
async def test_what_clients_say_about_themselves_changes_nothing(
    wrap: Wrap, keys: dict[str, str], tmp_path: Path, xargs: Any
) -> None:
    """Their other arguments, which are vLLM's, reach it."""
    app, server = wrap(api_keys=tmp_path / "keys.json")
    body = {**ASK, "vllm_xargs": xargs, "tenant": "south", "workflow_step": "lab", "user": "south"}
    assert (await asked(app, body, key=keys["desk"], state=server.state)).status == 200
    assert (noted(server).tenant, noted(server).workflow_step) == ("north", "desk")
    assert {name: server.bodies[-1]["vllm_xargs"][name] for name in xargs} == xargs


async def test_a_note_of_the_clients_own_is_refused(wrap: Wrap, keys: dict[str, str], tmp_path: Path) -> None:
    """Even one that another answer of this server may have shown it."""
    app, server = wrap(api_keys=tmp_path / "keys.json")
    await asked(app, ASK, key=keys["lab"], state=server.state)
    stolen = server.bodies[-1]["vllm_xargs"]["precedent"]
    for said in (stolen, '{"tenant": "south"}', "x" * (MAX_CHARACTERS + 1), 1, None, ["on"], True):
        answer = await asked(app, {**ASK, "vllm_xargs": {"precedent": said}}, key=keys["desk"], state=server.state)
        assert (answer.status, answer.json["error"]["param"]) == (400, "vllm_xargs")
    assert len(server.bodies) == 1


@pytest.mark.parametrize("key", [None, "pk-nobody", ""])
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/tokenize", "/v1/embeddings", "/anything"])
async def test_without_a_valid_key_nothing_passes(
    wrap: Wrap, keys: dict[str, str], tmp_path: Path, key: str | None, path: str
) -> None:
    app, server = wrap(api_keys=tmp_path / "keys.json")
    answer = await asked(app, ASK, key=key, path=path, state=server.state)
    assert (answer.status, answer.json["error"]["code"]) == (401, "invalid_api_key")
    assert server.scopes == []


async def test_open_routes_and_questions_of_browsers_need_no_key(
    wrap: Wrap, keys: dict[str, str], tmp_path: Path
) -> None:
    app, server = wrap(api_keys=tmp_path / "keys.json")
    assert (await asked(app, path="/health", method="GET", state=server.state)).status == 200
    assert (await asked(app, method="OPTIONS", state=server.state)).status == 200
    assert (await asked(app, path="/root/health", root_path="/root", method="GET", state=server.state)).status == 200


async def test_a_websocket_without_a_key_is_closed(wrap: Wrap, keys: dict[str, str], tmp_path: Path) -> None:
    app, server = wrap(api_keys=tmp_path / "keys.json")
    answer = await asked(app, type="websocket", path="/v1/realtime", state=server.state)
    assert [(one["type"], one["code"]) for one in answer.sent] == [("websocket.close", 1008)]
    assert server.scopes == []


async def test_without_keys_and_tenant_nothing_is_stored(wrap: Wrap, tmp_path: Path) -> None:
    app, server = wrap()
    assert (await asked(app, ASK, state=server.state)).status == 200
    assert noted(server).tenant is None
    assert "return_token_ids" not in server.bodies[-1]
    closed(app)
    assert not (tmp_path / "cache.db").exists()


async def test_speculation_off_is_neither_drafted_nor_stored(wrap: Wrap, tmp_path: Path) -> None:
    app, server = wrap(tenant="north")
    await asked(app, {**ASK, "vllm_xargs": {"precedent": "off"}}, state=server.state)
    assert not noted(server).on
    closed(app)
    assert not (tmp_path / "cache.db").exists()


async def test_the_kill_switch_leaves_the_keys(wrap: Wrap, keys: dict[str, str], tmp_path: Path) -> None:
    app, server = wrap(on=False, api_keys=tmp_path / "keys.json")
    assert (await asked(app, ASK, state=server.state)).status == 401
    assert (await asked(app, ASK, key=keys["desk"], state=server.state)).status == 200
    assert server.bodies == [ASK]
    closed(app)
    assert not (tmp_path / "cache.db").exists()


async def test_without_the_plugins_secret_requests_pass_as_they_are(
    wrap: Wrap, keys: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As under a VLLM_PLUGINS that leaves it out: said once, and the keys are asked for all the same."""
    app, server = wrap(secret=b"", api_keys=tmp_path / "keys.json")
    assert (await asked(app, ASK, state=server.state)).status == 401
    assert (await asked(app, ASK, key=keys["desk"], state=server.state)).status == 200
    assert server.bodies == [ASK]
    assert caplog.text.count("VLLM_PLUGINS") == 1


async def test_predictions_reach_the_drafter_and_not_vllm(wrap: Wrap) -> None:
    app, server = wrap(tenant="north")
    for content in ("order 17 was sent", [{"type": "text", "text": "order 17 "}, {"type": "text", "text": "was sent"}]):
        await asked(app, {**ASK, "prediction": {"type": "content", "content": content}}, state=server.state)
        assert noted(server).prediction == "order 17 was sent"
        assert "prediction" not in server.bodies[-1]


WRONG = ["a text", 7, [], {}, {"type": "content"}, {"type": "x", "content": "y"}, {"type": "content", "content": 7}]


@pytest.mark.parametrize("prediction", [*WRONG, {"type": "content", "content": "x" * 64 * 64 + "x"}], ids=range(8))
async def test_a_prediction_that_none_can_be_is_refused(wrap: Wrap, prediction: Any) -> None:
    app, server = wrap(tenant="north")
    answer = await asked(app, {**ASK, "prediction": prediction}, state=server.state)
    assert (answer.status, answer.json["error"]["param"]) == (400, "prediction")
    assert server.bodies == []


ODD: list[bytes | Any] = [
    b"",
    b"{",
    b"[" * 100_000,
    b"\xff\xfe",
    [],
    7,
    {"messages": 7, "model": ["m"]},
    {"messages": [7, {}, {"role": 1}, {"role": "user"}, {"role": "user", "content": [7, {"text": 7}]}]},
    {"messages": [{"role": "assistant", "content": None, "tool_calls": [7, {}, {"function": {"name": 7}}]}]},
    {"messages": [{"role": "user", "content": "half \ud800"}], "tools": [7]},
    {"messages": [{"role": "user", "content": "x"}], "tools": {"a": 1}},
    {"prompt": "half \ud800", "vllm_xargs": 7},
    {"prompt": [1, 2, 3]},
    {"prompt": [[1], [2]], "vllm_xargs": None},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "x"}]}]},
]


@pytest.mark.parametrize("body", ODD, ids=range(len(ODD)))
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"])
async def test_what_vllm_refuses_reaches_vllm(wrap: Wrap, body: bytes | Any, path: str) -> None:
    app, server = wrap(tenant="north")
    answer = await asked(app, body, path=path, state=server.state)
    assert answer.status == (400 if body in (b"{", b"[" * 100_000, b"\xff\xfe") else 200)
    if server.bodies and isinstance(body, dict) and body.get("vllm_xargs") != 7:
        assert noted(server).tenant == "north"


async def test_a_body_without_end_is_refused(wrap: Wrap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("precedent_vllm.middleware.MAX_BODY_BYTES", 1000)
    app, server = wrap(tenant="north")
    assert (await asked(app, b"x" * 1001, state=server.state)).status == 413
    assert server.scopes == []


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wanted", [None, False, True])
async def test_token_ids_are_shown_to_those_who_asked(wrap: Wrap, stream: bool, wanted: bool | None) -> None:
    """Everybody else gets, byte for byte, what vLLM answers without us."""
    app, server = wrap([40, 41, 42, 43, 44, 2], [50, 51, 2], tenant="north")
    body = {**ASK, "stream": stream, **({} if wanted is None else {"return_token_ids": wanted})}
    with_us, without = await asked(app, body, state=server.state), await asked(server, body, state=server.state)
    assert with_us.body == without.body if stream else with_us.json == without.json
    assert (str(PROMPT).replace(" ", "") in with_us.body.decode().replace(" ", "")) is (wanted is True)
    if not stream:
        assert int(with_us.headers[b"content-length"]) == len(with_us.body)


@pytest.mark.parametrize("stream", [False, True])
async def test_every_answer_of_a_request_is_stored(wrap: Wrap, tmp_path: Path, stream: bool) -> None:
    app, server = wrap([40, 41, 42, 43, 44, 2], [50, 51, 2], tenant="north")
    await asked(app, {**ASK, "stream": stream, "n": 2}, state=server.state)
    closed(app)
    assert kept(tmp_path) == [("north", (40, 41, 42, 43, 44, 2)), ("north", (50, 51, 2))]


@pytest.mark.parametrize("finish", [None, "abort", "error"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_did_not_end_is_not_stored(
    wrap: Wrap, tmp_path: Path, stream: bool, finish: str | None
) -> None:
    app, server = wrap(tenant="north", finish=finish)
    await asked(app, {**ASK, "stream": stream}, state=server.state)
    closed(app)
    assert not (tmp_path / "cache.db").exists() or kept(tmp_path) == []


async def test_a_client_that_goes_away_leaves_nothing(wrap: Wrap, tmp_path: Path) -> None:
    app, server = wrap(tenant="north")
    for messages in range(1, 5):
        await asked(app, {**ASK, "stream": True}, state=server.state, leaves_after=messages)
    closed(app)
    assert not (tmp_path / "cache.db").exists()


async def test_metrics_gain_the_counts_of_all_processes(wrap: Wrap, tmp_path: Path) -> None:
    folder = tmp_path / "counts"
    folder.mkdir()
    written_to(folder / "counts-77.json", {"precedent:spec_decode_num_accepted_tokens": {'source="recall"': 5}})
    app, server = wrap(tenant="north", folder=folder)
    await asked(app, ASK, state=server.state)
    assert app._keeper is not None
    app._keeper.close()
    told = await asked(app, path="/metrics", method="GET", state=server.state)
    lines = told.body.decode().splitlines()
    assert lines[0] == "vllm:num_requests_running 0.0"
    assert 'precedent:spec_decode_num_accepted_tokens_total{process="77",source="recall"} 5' in lines
    assert [line.rpartition("} ")[2] for line in lines if line.startswith("precedent:stored_answers_total")] == ["1"]
    assert int(told.headers[b"content-length"]) == len(told.body)


async def test_the_end_of_the_server_waits_for_what_is_to_be_stored(wrap: Wrap, tmp_path: Path) -> None:
    app, server = wrap(tenant="north")
    await asked(app, ASK, state=server.state)
    await asked(app, type="lifespan", state=server.state)
    assert app._keeper is None
    assert kept(tmp_path) == [("north", tuple(ANSWER))]


def test_a_store_that_is_not_ready_at_the_start_is_tried_again(
    tmp_path: Path, model_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cache.db"
    path.write_text("something else's")
    keeper = Keeper(Settings(store=str(path), embedder=HashEmbedder(), secret=SECRET), model_folder)
    keeper.warm_up()
    keeper._executor.submit(path.unlink).result()
    keeper.keep([(PROMPT, ANSWER)], Note(tenant="north"), "m")
    keeper.close()
    assert caplog.text.count("the store is not ready") == 1
    assert kept(tmp_path) == [("north", tuple(ANSWER))]


async def test_pieces_of_a_stream_may_end_anywhere(wrap: Wrap, model_folder: str) -> None:
    """Within an event, within a character; and the end may lack its blank line."""
    server = FakeServer(model_folder, ANSWER)
    whole = b"".join(server.events({"return_token_ids": True}))
    plain = b"".join(server.events({}))

    @given(st.lists(st.integers(0, len(whole)), max_size=12))
    def check(cuts: list[int]) -> None:
        gathered = Gathered(shows_ids=False)
        events, ends = Events(gathered), [0, *sorted(cuts), len(whole)]
        pieces = [whole[start:end] for start, end in pairwise(ends)]
        out = b"".join(events.push(piece, last=False) for piece in pieces) + events.push(b"", last=True)
        assert out == plain
        assert list(gathered.whole()) == [(PROMPT, ANSWER)]

    check()


def test_a_store_that_does_not_open_loses_answers_and_nothing_else(
    tmp_path: Path, model_folder: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "cache.db").write_text("something else's")
    settings = Settings(store=str(tmp_path / "cache.db"), embedder=HashEmbedder(), secret=SECRET)
    keeper = Keeper(settings, model_folder)
    keeper.keep([(PROMPT, ANSWER)], Note(tenant="north"), "m")
    keeper.close()
    counts = keeper.counts()
    assert (counts["precedent:stored_answers"], counts["precedent:unstored_answers"]) == ({"": 0}, {"": 1})
    assert "an answer was not stored" in caplog.text
