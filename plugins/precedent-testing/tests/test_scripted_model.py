"""The shipped test double: real trees, real verification, scripted logits; and the fixtures that hand it out."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent import SamplingParams, SpeculationCache, SpeculationConfig
from precedent.errors import ConfigError, GenerationError
from precedent.grammar import Grammar, JsonSchema, Regex
from precedent.langchain import ChatPrecedent
from precedent_testing.embedders import HashEmbedder
from precedent_testing.lossless import assert_lossless as check
from precedent_testing.pytest_plugin import EngineMaker, LosslessAssertion
from precedent_testing.scripted_engine import ScriptedEngine
from precedent_testing.scripted_model import scripted_tokenizer

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


def test_a_script_that_is_used_up_fails_the_request(precedent_engine: EngineMaker) -> None:
    engine = precedent_engine([])
    with pytest.raises(GenerationError, match="the script's 0 answers are used up"):
        engine.submit(ids("hi"), SamplingParams()).result()


# Under a grammar: the script, or an error

A_NUMBER = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(params=["real", "without a model"])
def make(request: pytest.FixtureRequest, precedent_engine: EngineMaker) -> Any:
    """Both engines that follow a script."""
    return precedent_engine if request.param == "real" else partial(ScriptedEngine, TOKENIZER)


def answered(engine: Any, grammar: Grammar, **settings: Any) -> str:
    return str(engine.submit(ids("hi"), SamplingParams(**settings), grammar=grammar).result().text)


@pytest.mark.parametrize("script", ['{"a":1}', '{"a": 1}', '{\n  "a" : 1 }\n'])
def test_white_space_that_a_grammar_wants_is_written(make: Any, script: str) -> None:
    assert answered(make([script]), JsonSchema.of(A_NUMBER)) == '{"a": 1}'


@pytest.mark.parametrize(
    ("script", "grammar"),
    [
        ("I would rather write prose.", JsonSchema.of(A_NUMBER)),
        ('{"a": "1"}', JsonSchema.of(A_NUMBER)),
        ('"No sound"', JsonSchema.of({"enum": ["Nosound"]})),
        ("", Regex("a+")),
        ("ab", Regex("a b")),
    ],
)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 1}], ids=["greedy", "sampled"])
def test_what_a_grammar_forbids_is_an_error_and_never_something_else(
    make: Any, script: str, grammar: Grammar, sampling: dict[str, Any]
) -> None:
    with pytest.raises(GenerationError, match="forbids what the script says next"):
        answered(make([script]), grammar, **sampling)
    strayed = answered(make([script], may_stray=True), grammar, max_tokens=40, **sampling)
    assert strayed != script, "it was asked for by name"


def test_a_request_that_fails_beside_others_leaves_them_alone(precedent_engine: EngineMaker) -> None:
    engine = precedent_engine(lambda prompt: '{"a":1}' if "good" in prompt else "prose")
    running = [
        engine.submit(ids(text), SamplingParams(), grammar=JsonSchema.of(A_NUMBER)) for text in ("good", "bad") * 4
    ]
    for good, bad in zip(running[::2], running[1::2], strict=True):
        assert good.result().text == '{"a": 1}'
        with pytest.raises(GenerationError, match="'prose'"):
            bad.result()


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('ab \\"{,é', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("ab :", max_size=3), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=40)
@given(VALUES, st.sampled_from([None, 0, 3]), st.sampled_from([",", ", ", " ,"]), st.sampled_from([":", ": ", " : "]))
def test_json_in_any_layout_comes_out_as_the_same_value(value: Any, indent: Any, item: str, key: str) -> None:
    script = json.dumps(value, indent=indent, separators=(item, key), ensure_ascii=False)
    engine = ScriptedEngine(TOKENIZER, [script])
    written = answered(engine, JsonSchema.of({"const": value}))
    assert written == json.dumps(value, ensure_ascii=False)


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
    [((), {}, "needs inputs"), (("hi",), {"temperature": 1.0}, "mode 'traversal' are sampled anew each time")],
)
def test_what_cannot_be_compared_is_refused(
    precedent_engine: EngineMaker, inputs: tuple[str, ...], kwargs: Any, said: str
) -> None:
    llm = ChatPrecedent.from_engine(precedent_engine(lambda prompt: "yes"))
    with pytest.raises(ConfigError, match=said):
        check(llm, *inputs, **kwargs)


def test_pytest_starts_without_torch() -> None:
    script = (
        "import sys, precedent_testing.pytest_plugin; "
        "print([name for name in ('torch', 'transformers', 'langchain_core', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
