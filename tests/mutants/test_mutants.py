"""The mutants still apply, and their runner tells those that were seen from those that were not."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import mutant_plugin
import pytest
import run as runner
from mutant import Mutant, MutantGone
from mutant_changes import instead
from mutants import MUTANTS
from seen_in import SEEN_IN

ROOT = Path(__file__).parents[2]


def test_for_each_mutant_a_file_is_named_that_sees_it() -> None:
    assert SEEN_IN.keys() == MUTANTS.keys()
    assert all((ROOT / runner.TESTS / f"test_{name}.py").is_file() for name in SEEN_IN.values())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_applies_and_leaves_nothing_behind(name: str) -> None:
    owner, attribute, _ = MUTANTS[name]._found()
    before = inspect.getattr_static(owner, attribute)
    with MUTANTS[name].applied():
        assert inspect.getattr_static(owner, attribute) is not before
    assert inspect.getattr_static(owner, attribute) is before


def test_a_function_is_replaced_wherever_it_is_known_by_its_name() -> None:
    from precedent.langchain import chat_model, messages

    with MUTANTS["drop the system message"].applied():
        assert chat_model.to_template_messages is messages.to_template_messages
        turns = [{"role": "system"}, {"role": "user"}]
        assert chat_model.to_template_messages.__closure__ is not None
        assert MUTANTS["drop the system message"].change(lambda given: given)(turns) == turns[1:]


@pytest.mark.parametrize(
    "target", ["precedent.langchain.chunks:NoSuch.of", "precedent.no_such:thing", "precedent.langchain.tools:no_such"]
)
def test_a_mutant_whose_attribute_is_gone_says_so(target: str) -> None:
    with pytest.raises(MutantGone, match=f"{target} is not there any more"), Mutant(target, instead(None)).applied():
        pass


SEEN = "....F\n=== short test summary info ===\nFAILED tests/a.py::test_b[c] - AssertionError: no\n1 failed\n"


@pytest.mark.parametrize(
    ("name", "returncode", "output", "right", "words"),
    [
        ("a mutant", 1, SEEN, True, "tests/a.py::test_b[c]"),
        ("a mutant", 1, SEEN.replace("FAILED", "ERROR"), True, "tests/a.py::test_b[c]"),
        ("a mutant", 0, "9 passed\n", False, "SURVIVED"),
        ("a mutant", mutant_plugin.BROKEN, SEEN, False, "BROKEN"),
        ("a mutant", 2, "1 error during collection\n", False, "BROKEN"),
        ("a mutant", 5, "no tests ran\n", False, "BROKEN"),
        (runner.NONE, 0, "9 passed\n", True, "the tests pass"),
        (runner.NONE, 1, SEEN, False, "the tests fail without a mutant: tests/a.py"),
    ],
)
def test_what_came_of_a_run(name: str, returncode: int, output: str, right: bool, words: str) -> None:
    found = runner.verdict(name, returncode, output)
    assert found[0] is right
    assert words in found[1]


@pytest.mark.parametrize(("survivor", "status"), [(None, 0), ("drop usage", 1), (runner.NONE, 1)])
def test_one_survivor_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], survivor: Any, status: int
) -> None:
    asked: list[str] = []

    def run(name: str, tests: list[str]) -> tuple[bool, str]:
        asked.append(name)
        return name != survivor, "a test" if name != survivor else "SURVIVED"

    monkeypatch.setattr(runner, "run", run)
    assert runner.main([]) == status
    assert sorted(asked) == sorted([runner.NONE, *MUTANTS])
    assert ("SURVIVED" in capsys.readouterr().out) is bool(status)


@pytest.mark.parametrize(("turns", "noted"), [([{"no": "role"}], True), (7, False)])
def test_a_mutant_that_raises_by_itself_is_told_from_the_library(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, turns: Any, noted: bool
) -> None:
    """What the library itself makes of a mutant counts, an error in the mutants' own code does not."""
    broken: list[str] = []
    monkeypatch.setattr(mutant_plugin, "_broken", broken)
    change = MUTANTS["drop the system message"].change(lambda given: list(given) if given != 7 else int("x"))
    error = pytest.CallInfo.from_call(lambda: change(turns), "call")
    mutant_plugin.pytest_runtest_makereport(request.node, error)
    assert bool(broken) is noted


@pytest.mark.slow
def test_the_runner_runs_tests_on_a_mutant(tmp_path: Path) -> None:
    """The real thing, on a test that sees the mutant and on one that does not."""
    begin = (
        "from langchain_core.messages import HumanMessage, SystemMessage\nfrom precedent.langchain import messages\n"
    )
    asked = "messages.to_template_messages([SystemMessage('a'), HumanMessage('b')])"
    sees, misses = tmp_path / "test_sees.py", tmp_path / "test_misses.py"
    sees.write_text(f"{begin}def test_it():\n    assert len({asked}) == 2\n")
    misses.write_text(f"{begin}def test_it():\n    assert {asked}\n")
    assert runner.run(runner.NONE, [str(sees)]) == (True, "the tests pass")
    seen, words = runner.run("drop the system message", [str(sees)])
    assert (seen, words.rsplit("/", 1)[-1]) == (True, "test_sees.py::test_it")
    assert runner.run("drop the system message", [str(misses)]) == (False, "SURVIVED")


def test_the_documentation_counts_them() -> None:
    assert len(MUTANTS) >= 25
    assert f"{len(MUTANTS)} mutants" in (ROOT / "docs" / "explanation" / "lossless.md").read_text(encoding="utf-8")
