"""Programs end by themselves, and forked processes refuse or work: no waiting for threads that are not there."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from helpers.forked import run

PROGRAM = Path(__file__).with_name("process_program.py")

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that fork")

FORKED = "was made before the process was forked: load the model in the process"
ENGINE = f"UnsupportedError: this ScriptedModelEngine {FORKED}"
CHAT_ENGINE = f"UnsupportedRequestError: this Engine {FORKED}"
GENERATION = "UnsupportedError: this Generation was made before the process was forked: ask again"
CACHE = (
    "CacheError: this SpeculationCache was made before the process was forked: give its path or URL, and open it only"
)
AMID = "this process was forked while another thread was loading or running a model"
OPEN = "was open when this process was forked, and SQLite cannot open it here too"

ENDING = {
    "ends_while_the_embedder_is_loaded": (0, [False]),
    "ends_by_sys_exit_while_a_task_loads": (3, [False]),
}
ENDING_SLOWLY = {
    "ends_with_an_open_cache": (0, [["MainThread"]]),
    "ends_with_an_abandoned_stream": (0, [True]),
    "ends_with_an_abandoned_async_stream": (0, [True]),
    "ends_by_an_exception": (1, []),
    "ends_by_sys_exit_in_a_task": (3, [False]),
    "ends_while_a_daemon_thread_asks": (0, [True]),
    "ends_after_generate": (0, [10]),
    "a_thread_that_counts_goes_on_after_the_main_one": (0, [[True, True], 2]),
}
"""The status with which a program ends, and what it has said before."""

FORKING = ("an_engine_refuses_in_a_fork", "a_cache_refuses_in_a_fork", "a_model_that_was_not_loaded_works_in_a_fork")


class Ran:
    """The scenarios that were run, one process for all of a kind."""

    def __init__(self) -> None:
        self._found: dict[str, dict[str, Any]] = {}

    def of(self, name: str, together: tuple[str, ...]) -> dict[str, Any]:
        """What came of a scenario; `together` names those that are run now, if it has not been yet."""
        if name not in self._found:
            done = run([PROGRAM, *{name: None, **dict.fromkeys(together)}])
            lines = [json.loads(line) for line in done.stdout.splitlines()]
            self._found |= {line["name"]: line | {"stderr": done.stderr} for line in lines}
            assert name in self._found, done.stderr
        return self._found[name]

    def said(self, name: str, together: tuple[str, ...]) -> list[Any]:
        """What a scenario said that ended as it should."""
        found = self.of(name, together)
        assert found["status"] == 0, found
        said: list[Any] = found["said"]
        return said


@pytest.fixture(scope="module")
def ran() -> Ran:
    return Ran()


def in_child(said: Any) -> list[Any]:
    """What a forked process said that ended as it should."""
    assert said["status"] == 0, said
    found: list[Any] = said["said"]
    return found


FAST = (*ENDING, *FORKING)


@pytest.mark.parametrize("name", ENDING)
def test_a_program_ends_by_itself(name: str, ran: Ran) -> None:
    found = ran.of(name, FAST)
    assert (found["status"], found["said"]) == ENDING[name], found


def test_an_engine_that_was_made_before_a_fork_says_so_at_once(ran: Ran) -> None:
    """Also where another thread of the parent's held every lock of it."""
    of_child, after = ran.said("an_engine_refuses_in_a_fork", FAST)
    outcomes, not_called = in_child(of_child)
    harmless = {name: outcomes.pop(name) for name in ("close", "cancel")}
    assert set(harmless.values()) == {"returned None"}
    of_generations = {name: outcomes.pop(name) for name in ("result", "iterate", "iterate async")}
    assert all(said.startswith(GENERATION) for said in of_generations.values()), of_generations
    assert set(outcomes) == {"submit", "metrics", "health", "longest_wait", "watch_steps", "grammars", "add_drafter"}
    assert all(said.startswith(ENGINE) for said in outcomes.values()), outcomes
    assert not_called == [
        *("check_process", "closed", "context_length", "drafters", "instead", "is_here"),
        *("load", "recall", "refused_as", "sampling_defaults"),
    ]
    assert after == "hello", "the parent's goes on"


def test_a_cache_that_was_opened_before_a_fork_says_so_at_once(ran: Ran) -> None:
    of_child, records = ran.said("a_cache_refuses_in_a_fork", FAST)
    on_disk, in_memory, not_called = in_child(of_child)
    for outcomes in (on_disk, in_memory):
        assert outcomes.pop("close") == "returned None"
        assert len(outcomes) == 19
        assert all(said.startswith(CACHE) for said in outcomes.values()), outcomes
    assert not_called == [
        *("check_process", "embedder", "instead", "is_here"),
        *("on_forget", "on_gone", "open", "refused_as"),
    ]
    assert records == [1, 1]


def test_a_model_that_was_not_loaded_before_a_fork_works(ran: Ran) -> None:
    """Beside an engine that rests, after computing on several threads, with every lock of a registry held elsewhere."""
    child, of_parent = ran.said("a_model_that_was_not_loaded_works_in_a_fork", FAST)
    unused, asynchronous, unknown = in_child(child)
    assert (unused, asynchronous, of_parent) == (True, True, True)
    assert "(loaded: not yet)" in unknown, "the parent's engines are not among those of the child"


# The others take longer

SLOW = (
    *ENDING_SLOWLY,
    *("a_chat_model_refuses_in_a_fork", "a_fork_amid_computing_refuses_to_compute"),
    *("a_fork_beside_a_busy_engine_works", "children_that_end_leave_their_parent_whole"),
    *("a_file_that_is_open_is_not_opened_in_a_fork", "a_recorder_goes_on_in_a_fork", "an_embedder_goes_on_in_a_fork"),
    *("generate_goes_on_in_a_fork", "multiprocessing_forks_as_well", "a_spawned_process_loads_its_own"),
)


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDING_SLOWLY)
def test_a_program_ends_whatever_still_runs(name: str, ran: Ran) -> None:
    found = ran.of(name, SLOW)
    assert (found["status"], found["said"]) == ENDING_SLOWLY[name], found


@pytest.mark.slow
def test_a_chat_model_that_was_loaded_before_a_fork_says_so_on_every_way(ran: Ran) -> None:
    of_child, after = ran.said("a_chat_model_refuses_in_a_fork", SLOW)
    outcomes, closed = in_child(of_child)
    assert outcomes.pop("warm").startswith(CACHE)
    assert outcomes.pop("the stream that was begun").startswith(GENERATION)
    assert len(outcomes) == 9
    assert all(said.startswith(CHAT_ENGINE) for said in outcomes.values()), outcomes
    assert (closed, after) == ("returned None", True)


@pytest.mark.slow
def test_a_fork_while_another_thread_computes_refuses_rather_than_hangs(ran: Ran) -> None:
    of_child, tokens = ran.said("a_fork_amid_computing_refuses_to_compute", SLOW)
    (outcomes,) = in_child(of_child)
    assert set(outcomes) == {"chat", "cache", "embedder", "generate", "engine"}
    assert outcomes.pop("chat").startswith(f"UnsupportedRequestError: {AMID}")
    assert all(said.startswith(f"UnsupportedError: {AMID}") for said in outcomes.values()), outcomes
    assert tokens == 4


@pytest.mark.slow
def test_a_fork_waits_for_a_step_of_a_busy_engine(ran: Ran) -> None:
    *children, tokens = ran.said("a_fork_beside_a_busy_engine_works", SLOW)
    assert [in_child(child) for child in children] == [[True]] * 5
    assert tokens > 0


@pytest.mark.slow
def test_children_break_nothing_of_their_parents(ran: Ran) -> None:
    said = ran.said("children_that_end_leave_their_parent_whole", SLOW)
    assert said == [0, 0, 1, 0, 7, True, 7]


@pytest.mark.slow
def test_a_cache_file_that_the_parent_has_open_is_refused_by_name(ran: Ran) -> None:
    of_child, later = ran.said("a_file_that_is_open_is_not_opened_in_a_fork", SLOW)
    (same, other), of_grandchild, of_model = in_child(of_child)
    ((same_again, other_again),) = in_child(of_grandchild)
    assert all(OPEN in said for said in (same, same_again, of_model)), (same, same_again, of_model)
    assert other == other_again == "returned 0"
    assert in_child(later)[0][0] == "returned 1", "closed before the fork, it may be opened"


@pytest.mark.slow
def test_what_holds_a_lock_but_no_thread_goes_on(ran: Ran) -> None:
    of_child, lines = ran.said("a_recorder_goes_on_in_a_fork", SLOW)
    assert (in_child(of_child), lines) == ([True], 2)
    (of_child,) = ran.said("an_embedder_goes_on_in_a_fork", SLOW)
    assert in_child(of_child) == [1]
    (of_child,) = ran.said("generate_goes_on_in_a_fork", SLOW)
    assert in_child(of_child) == [True]


@pytest.mark.slow
def test_multiprocessing_may_fork_and_spawn(ran: Ran) -> None:
    ((status, (used, unused)),) = ran.said("multiprocessing_forks_as_well", SLOW)
    assert (status, unused) == (0, True)
    assert used.startswith(CHAT_ENGINE)
    assert ran.said("a_spawned_process_loads_its_own", SLOW) == [[0, [{}, 0.5], True]]


@pytest.mark.slow
def test_a_database_server_is_asked_by_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("precedent_postgres.testing", reason="precedent-postgres is not installed")
    if testing.why_not() is not None:
        pytest.skip(str(testing.why_not()))
    with testing.TemporaryServer() as server:
        monkeypatch.setenv("SERVER", server.url)
        of_child, *others, records = Ran().said("a_server_is_asked_by_one_process", ())
    (of_cache, of_connections, closed), own = in_child(of_child)
    assert of_cache.startswith(CACHE)
    assert of_connections.startswith("CacheError: this Connections was made before the process was forked: open the")
    assert (closed, own, others, records) == ("returned None", True, [0, 0], 2)
