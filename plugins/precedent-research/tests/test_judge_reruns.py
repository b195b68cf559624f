"""Reruns of recorded runs, which decode only what is new, and outcomes, which are found by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
from helpers.tiny_draft import tiny_target
from helpers.tiny_judge import MAX_TOKENS, RUNS, chat_model, outcome

from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.engine.options import EngineOptions
from precedent.errors import ConfigError, UnsupportedError
from precedent.planning.costs import CostCurve
from precedent.text.traces import Trajectory
from precedent_research.judge_training.outcomes import last_lines, load_outcome, prompts_of
from precedent_research.judge_training.reruns import Replaced, RerunEngine, Turn
from precedent_testing.tiny_models import byte_tokenizer

TOKENIZER = byte_tokenizer()
PLAIN = EngineOptions(speculation=SpeculationConfig(enabled=False, write_back=False))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Plain decoding of the target."""
    with closing(Engine(tiny_target(), TOKENIZER, PLAIN, name="tiny", cost=CostCurve())) as running:
        yield running


# Reruns


def test_a_rerun_decodes_only_what_is_new(engine: Engine) -> None:
    """Replaying decodes nothing; an answer with another token is decoded from there, and what follows it."""
    reruns = RerunEngine(engine)
    with reruns.recording() as turns:
        expected = outcome(RUNS[0], chat_model(reruns))
    assert reruns.num_decoded == sum(len(turn.answer_ids) for turn in turns) == 2 * MAX_TOKENS
    with reruns.repeating(turns):
        assert outcome(RUNS[0], chat_model(reruns)) == expected
    assert reruns.num_decoded == 2 * MAX_TOKENS
    again = replace_token(turns, 0, 4, turns[0].answer_ids[4])
    with reruns.repeating(turns, again):
        assert outcome(RUNS[0], chat_model(reruns)) == expected
    assert reruns.num_decoded == 2 * MAX_TOKENS + 1  # one token behind the place, and a known turn behind it


def replace_token(turns: list[Turn], turn: int, place: int, token: int) -> Replaced:
    return Replaced(turns[turn].prompt_ids, (*turns[turn].answer_ids[:place], token))


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"sampling": SamplingParams(temperature=0.5)}, "leave temperature=0.5 out"),
        ({"sampling": SamplingParams(frequency_penalty=1.0)}, "frequency_penalty would count anew"),
        ({"sampling": SamplingParams(logit_bias={3: 1.0})}, "logit_bias would count anew"),
        ({"sampling": SamplingParams(), "grammar": object()}, "a grammar holds"),
    ],
)
def test_answers_that_cannot_be_continued_are_refused(engine: Engine, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedError, match=message):
        RerunEngine(engine).submit([1, 2, 3], **asked)


def test_a_stop_string_across_the_new_token_ends_the_answer(engine: Engine) -> None:
    """Half of it in the recorded part, half behind it: the text and the tokens are cut where plain decoding cuts."""
    reruns = RerunEngine(engine)
    prompt = tuple(TOKENIZER.encode("Where is it?"))
    with reruns.recording() as turns:
        whole = reruns.submit(prompt, SamplingParams(max_tokens=MAX_TOKENS)).result()
    token = next(each for each in range(60, 90) if each != whole.token_ids[2])
    with reruns.repeating(turns, replace_token(turns, 0, 2, token)):
        free = reruns.submit(prompt, SamplingParams(max_tokens=MAX_TOKENS)).result()
    stop = TOKENIZER.decode(list(free.token_ids[2:4]))
    with reruns.repeating(turns, replace_token(turns, 0, 2, token)):
        cut = reruns.submit(prompt, SamplingParams(max_tokens=MAX_TOKENS, stop=stop)).result()
    assert free.finish_reason == "length"
    assert cut.finish_reason == "stop"
    assert cut.text == free.text[: free.text.index(stop)]


# Outcomes


class Parrot:
    """A chat model that says the same about every prompt, and keeps what it was asked."""

    def __init__(self, text: str) -> None:
        self.text, self.asked, self.tools = text, list[Any](), list[Any]()

    def bind_tools(self, tools: list[Any]) -> Parrot:
        self.tools = tools
        return self

    def invoke(self, messages: list[Any]) -> Parrot:
        self.asked.append(messages)
        return self


def test_the_outcome_of_texts_is_the_last_line_of_each_answer() -> None:
    """Of every recorded answer; of a single call, of the last one alone."""
    messages = tuple({"role": role, "content": "x"} for role in ("system", "user", "assistant", "user", "assistant"))
    run = Trajectory(0, "t", "t", messages, ({"type": "function"},))
    parrot = Parrot("Thinking.\n\nThe answer is  42. \n")
    assert last_lines(run, parrot) == ("the answer is 42.",) * 2
    assert [len(each) for each in parrot.asked] == [2, 4]
    assert parrot.tools == [{"type": "function"}]
    assert last_lines(run, Parrot("Well.\nthe ANSWER is 42.")) == last_lines(run, parrot)
    assert last_lines(run, Parrot("The answer is 43.")) != last_lines(run, parrot)
    assert prompts_of(replace(run, only_last=True)) == [messages[:4]]
    assert last_lines(run, Parrot("")) == ("", "")


def test_outcomes_are_found_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """The word text, an installed one, module:factory; anything else is refused by name."""
    assert load_outcome("text") is last_lines
    assert load_outcome("helpers.tiny_judge:agent").outcome is outcome
    with pytest.raises(ConfigError, match=r"no outcome is called 'tex' \(installed: .*text\); or write module:factory"):
        load_outcome("tex")
    with pytest.raises(ConfigError, match="the outcome 'no_such_module:made' cannot be loaded: No module named"):
        load_outcome("no_such_module:made")
    with pytest.raises(ConfigError, match=r"cannot be loaded: module 'helpers\.tiny_judge' has no attribute 'nothing'"):
        load_outcome("helpers.tiny_judge:nothing")
