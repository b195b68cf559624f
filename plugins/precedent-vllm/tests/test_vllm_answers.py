"""What the middleware takes from vLLM's answers, what it leaves in them, and what is stored."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.vllm_fakes import ANSWER, ASK, PROMPT, SECRET, FakeServer, Wrap, asked, closed, kept
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from precedent_testing.embedders import HashEmbedder
from precedent_vllm.answers import Events, Gathered
from precedent_vllm.counts import written_to
from precedent_vllm.keeper import Keeper
from precedent_vllm.note import Note
from precedent_vllm.settings import Settings


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


class Noting(HashEmbedder):
    """Notes what it embedded."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def embed(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.texts += texts
        return super().embed(texts)


async def test_the_store_is_open_and_its_embedder_loaded_before_the_first_answer(wrap: Wrap, tmp_path: Path) -> None:
    """An embedding model takes seconds to load: the second request would come before the first answer is stored."""
    embedder = Noting()
    app, server = wrap(tenant="north", embedder=embedder)
    await asked(app, type="lifespan", state=server.state)
    assert len(embedder.texts) == 1
    assert kept(tmp_path) == []


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


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda part: st.lists(part) | st.dictionaries(st.text(), part),
    )
)
def test_any_answer_can_be_looked_at(answer: Any) -> None:
    """What vLLM may come to answer one day is passed on, whatever it is."""
    gathered = Gathered(shows_ids=False)
    gathered.take(json.loads(json.dumps(answer)))
    list(gathered.whole())
