"""The shipped test double: real trees, real verification, scripted logits; and the fixtures that hand it out."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from precedent import SamplingParams, SpeculationCache, SpeculationConfig
from precedent.errors import ConfigError, GenerationError
from precedent.langchain import ChatPrecedent
from precedent.testing.embedders import HashEmbedder
from precedent.testing.lossless import assert_lossless as check
from precedent.testing.pytest_plugin import EngineMaker, LosslessAssertion
from precedent.testing.scripted_model import scripted_tokenizer
from precedent.testing.scripted_text import ScriptedText, pieces_of

TOKENIZER = scripted_tokenizer()
END = TOKENIZER.eos_token_id
ANSWERS = ["Grüße, 你好! Done.", '{"a": [1, 2], "b": "c d"}', ""]


def ids(text: str) -> list[int]:
    return list(TOKENIZER.encode(text, add_special_tokens=False))


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("speculation", [True, False])
def test_the_model_says_what_the_script_says(precedent_engine: EngineMaker, answer: str, speculation: bool) -> None:
    engine = precedent_engine([answer], draft_model=True)
    result = engine.submit(ids("hello"), SamplingParams(), speculation=SpeculationConfig(enabled=speculation)).result()
    assert (result.text, result.finish_reason) == (answer, "stop")
    assert result.token_ids == (*ids(answer), END)


def test_a_right_prediction_is_accepted_and_a_wrong_one_is_not(precedent_engine: EngineMaker) -> None:
    engine = precedent_engine(lambda prompt: "The order was sent to the new address.")
    right, wrong = (
        engine.submit(ids("hi"), SamplingParams(), prediction=guess).result()
        for guess in ("The order was sent to the new address.", "Nothing of the sort has ever happened.")
    )
    assert right.stats.num_steps < wrong.stats.num_steps
    assert right.text == wrong.text


def test_the_switch_of_the_environment_makes_an_engine_decode_plainly(
    precedent_engine: EngineMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = SpeculationCache.open(embedder=HashEmbedder())
    engine = precedent_engine(lambda prompt: "one two", cache=cache, draft_model=True)
    monkeypatch.setenv("PRECEDENT_SPECULATION", "off")
    off = engine.submit(ids("hi"), SamplingParams(), query="hi", prediction="one two").result()
    assert (off.text, off.stats.num_draft_tokens, cache.list()) == ("one two", 0, [])
    monkeypatch.setenv("PRECEDENT_SPECULATION", "on")
    on = engine.submit(ids("hi"), SamplingParams(), query="hi", prediction="one two").result()
    assert on.text == off.text
    assert on.stats.num_accepted_tokens > 0
    assert len(cache.list()) == 1


def test_sampling_and_seeds_follow_the_script_as_well(precedent_engine: EngineMaker) -> None:
    engine = precedent_engine(["one two"] * 2)
    for sampling in (SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, seed=3)):
        assert engine.submit(ids("hi"), sampling).result().text == "one two"


def test_a_script_that_is_used_up_fails_the_request(precedent_engine: EngineMaker) -> None:
    engine = precedent_engine([])
    with pytest.raises(GenerationError, match="the script has 0 answers"):
        engine.submit(ids("hi"), SamplingParams()).result()


# Where an answer stands in its script


def follow(answer: str, said: str) -> tuple[bytes, bytes]:
    """What comes next behind `said`, and what comes next without white space."""
    pieces = pieces_of(TOKENIZER)
    first, second = ScriptedText(TOKENIZER, 0, answer).next_after(ids(said))
    return pieces[first], pieces[second]


@given(st.text(max_size=40))
def test_every_token_of_the_script_follows_the_ones_before(answer: str) -> None:
    expected = (*ids(answer), END)
    script = ScriptedText(TOKENIZER, 2, answer)
    assert tuple(script.next_after((0, 0, *expected[:n]))[0] for n in range(len(expected))) == expected


def test_white_space_that_was_left_out_or_added_is_passed_over() -> None:
    assert follow('{"a": 1}', '{"a":')[0].startswith(b" ")
    assert follow('{"a": 1}', '{"a":')[1].startswith(b"1")
    assert follow('{"a": 1}', '{"a":1')[0] == b"}"
    assert follow('{"a":1}', '{ "a" :\n')[0].startswith(b"1")


def test_an_answer_that_left_the_script_ends() -> None:
    assert follow("abc", "abx") == (b"<|im_end|>", b"<|im_end|>")
    assert follow("abc", "abc") == (b"<|im_end|>", b"<|im_end|>")


# The fixtures


def test_lossless_answers_pass_and_are_counted(
    precedent_engine: EngineMaker, assert_lossless: LosslessAssertion
) -> None:
    engine = precedent_engine(lambda prompt: prompt[-60:-30], cache=SpeculationCache.open(embedder=HashEmbedder()))
    runs = assert_lossless(ChatPrecedent.from_engine(engine), "Where is my order?", "And what of the refund?")
    assert runs.num_answers == 2
    assert 0 < runs.num_accepted_tokens <= runs.num_tokens  # a whole answer may be foreseen, its end too


class Changed:
    """A chat model whose speculation is broken."""

    def __init__(self, llm: ChatPrecedent) -> None:
        self._llm, self._calls = llm, 0

    def invoke(self, text: str, **kwargs: Any) -> Any:
        self._calls += 1
        return self._llm.invoke(text if kwargs or self._calls < 3 else f"{text}!", **kwargs)


def test_a_changed_answer_fails_and_shows_both(precedent_engine: EngineMaker) -> None:
    engine = precedent_engine(lambda prompt: "no" if "!" in prompt else "yes")
    with pytest.raises(AssertionError, match=r"\(warm cache\) changed the text of answer 1:\s+plain: +'yes'\s.*'no'"):
        check(Changed(ChatPrecedent.from_engine(engine)), "Well?")


@pytest.mark.parametrize(
    ("inputs", "kwargs", "said"),
    [((), {}, "needs inputs"), (("hi",), {"temperature": 1.0}, "mode 'traversal' are drawn anew each time")],
)
def test_what_cannot_be_compared_is_refused(
    precedent_engine: EngineMaker, inputs: tuple[str, ...], kwargs: Any, said: str
) -> None:
    llm = ChatPrecedent.from_engine(precedent_engine(lambda prompt: "yes"))
    with pytest.raises(ConfigError, match=said):
        check(llm, *inputs, **kwargs)


def test_the_package_announces_its_fixtures_to_pytest() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (module,) = project["entry-points"]["pytest11"].values()
    assert module == EngineMaker.__module__


def test_pytest_starts_without_torch() -> None:
    script = (
        "import sys, precedent.testing.pytest_plugin; "
        "print([name for name in ('torch', 'transformers', 'langchain_core', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
