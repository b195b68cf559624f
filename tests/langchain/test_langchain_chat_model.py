"""`ChatPrecedent` on a scripted engine: one message whichever way it comes, what it says, and how it is written down.

`tests/golden` records whole messages and streams.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from helpers.call_ids import numbered
from helpers.order_chat import BROKEN, CALL, TOKENIZER, look_up, merged
from helpers.scripted_kinds import MODELS
from langchain_core.load import dumpd, dumps, load
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from precedent import SpeculationCache, SpeculationConfig, Templates
from precedent.decoding.stats import GenerationStats
from precedent.langchain import ChatPrecedent
from precedent.text.prompt import hermes_template
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "answers.md"
REASONING = chatml_tokenizer(chat_template=hermes_template())
REASONING.add_tokens(["<think>", "</think>"])


def with_a_tool(*answers: str, tokenizer: Any = TOKENIZER, output_version: str | None = None, **settings: Any) -> Any:
    engine: Any = ScriptedEngine(tokenizer, answers, **settings)
    return ChatPrecedent.from_engine(engine, output_version=output_version).bind_tools([look_up])


def comparable(message: BaseMessage) -> dict[str, Any]:
    """A message without what differs by run: ids, and the classes of chunks."""
    assert isinstance(message, AIMessage)
    fields = ("content", "content_blocks", "tool_calls", "invalid_tool_calls", "usage_metadata", "additional_kwargs")
    told = {name: numbered(getattr(message, name)) for name in fields}
    return told | {"metadata": dict(message.response_metadata)}


@pytest.mark.parametrize("output_version", ["v0", "v1"])
@pytest.mark.parametrize("max_burst", [1, 7])
@pytest.mark.parametrize(
    "answer",
    [
        *("", "Hello, ørder!", CALL, f"I look.\n{CALL}\n{CALL}\nDone.", f"{CALL}\n{BROKEN}"),
        *("<tool_call>nonsense</tool_call>", f"<think>hm</think>So.\n{CALL}"),
    ],
    ids=lambda answer: str(answer)[:14].replace("\n", " "),
)
async def test_invoke_and_stream_sync_and_async_give_one_message(
    answer: str, max_burst: int, output_version: str
) -> None:
    def model() -> Any:
        how: dict[str, Any] = {"seed": 1, "max_burst": max_burst, "output_version": output_version}
        return with_a_tool(answer, tokenizer=REASONING, **how)

    first, *others = [
        comparable(model().invoke("hi")),
        comparable(merged(list(model().stream("hi")))),
        comparable(await model().ainvoke("hi")),
        comparable(merged([chunk async for chunk in model().astream("hi")])),
    ]
    assert others == [first] * 3
    if output_version == "v1":
        assert {one["type"] for one in first["content"]} == {one["type"] for one in first["content_blocks"]}
    usage, figures = first["usage_metadata"], first["metadata"]["speculation"]
    assert figures["num_steps"] + figures["num_accepted_tokens"] == usage["output_tokens"]


def test_a_call_is_streamed_while_it_is_written_and_the_figures_come_last() -> None:
    chunks = list(with_a_tool(f"I look.\n{CALL}", max_burst=1).stream("hi"))
    first, *pieces = [piece for chunk in chunks for piece in chunk.tool_call_chunks]
    assert (first["name"], first["args"], first["index"]) == ("look_up", "", 0)
    assert "".join(piece["args"] or "" for piece in pieces) == '{"number": "10 €"}'
    assert len(pieces) > 10, "one for each token, or nearly"
    assert all(not chunk.response_metadata and chunk.usage_metadata is None for chunk in chunks[:-1])


def test_blocks_of_v1_stand_in_the_order_of_the_answer() -> None:
    model = with_a_tool(*[f"I look.\n{CALL}\n{CALL}\nDone."] * 4, output_version="v1")
    answer = model.invoke("hi")
    assert [block["type"] for block in answer.content] == ["text", "tool_call", "tool_call", "text"]
    assert [block.get("text") for block in answer.content] == ["I look.", None, None, "\nDone."]
    prompts = []
    for said in (answer, AIMessage(answer.content)):
        model.invoke([HumanMessage("hi"), said, HumanMessage("and?")])
        prompts.append(model.bound.engine.requests[-1].prompt)
    assert prompts[0] == prompts[1], "and can be said again by themselves"
    assert prompts[0].count("10 €") == 2


def scripted(*answers: str, kind: Any = ChatPrecedent, name: str = "scripted", **fields: Any) -> Any:
    return kind.from_engine(ScriptedEngine(TOKENIZER, answers, model_name=name), **fields)


@pytest.mark.filterwarnings("ignore::langchain_core._api.beta_decorator.LangChainBetaWarning")
def test_a_model_is_written_without_weights_and_read_back() -> None:
    model = ChatPrecedent(
        model="folder/name",
        draft_model="first-layers:2",
        speculation_cache="orders.db",
        temperature=0.5,
        stop=["x"],
        speculation=SpeculationConfig(max_nodes=4),
        templates=Templates(["Order {number}."]),
        model_kwargs={"revision": "main", "token": "hf_secret"},
        api_key="sk-secret",
    )
    written = dumpd(model)
    assert "secret" not in json.dumps(written)
    assert "not_implemented" not in json.dumps(written)
    again = load(written, allowed_objects=[ChatPrecedent], valid_namespaces=["precedent"])
    speculation = written["kwargs"]["speculation"]
    assert again._identifying_params == {**model._identifying_params, "speculation": speculation}
    assert SpeculationConfig.from_dict(speculation).max_nodes == 4
    assert again.model_kwargs == {"revision": "main"}
    assert again._engine_options().draft_model == "first-layers:2"


def test_objects_that_only_speed_up_are_left_out_and_a_cache_is_its_path(tmp_path: Path) -> None:
    with SpeculationCache.open(tmp_path / "c.db", embedder=HashEmbedder()) as cache:
        kwargs = dumpd(ChatPrecedent(model="m", speculation_cache=cache, embedder=HashEmbedder()))["kwargs"]
    assert (kwargs["speculation_cache"], kwargs["embedder"]) == (str(tmp_path / "c.db"), None)
    assert dumpd(scripted("a"))["kwargs"]["model"] == "scripted", "weights that were handed over, by their name"
    assert "engines" not in dumps(scripted("a"))


@MODELS
def test_a_call_is_described_on_the_span_around_it(kind: Any) -> None:
    with TracerProvider().get_tracer("test").start_as_current_span("call") as span:
        list(scripted("ab", kind=kind).stream("hi", max_tokens=7))
    assert isinstance(span, ReadableSpan)
    expected = {
        "gen_ai.operation.name": "chat" if kind is ChatPrecedent else "text_completion",
        "gen_ai.provider.name": "precedent",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.0,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.usage.output_tokens": 3,
        "precedent.speculation.mode": "greedy",
    }
    attributes = dict(span.attributes or {})
    assert {key: attributes.get(key) for key in expected} == expected
    assert "gen_ai.request.seed" not in attributes, "a setting that was not made is not told"


def listed_below(heading: str) -> dict[str, str]:
    """Meaning by key, of the list below a heading."""
    section = PAGE.read_text(encoding="utf-8").split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^- (`\w+`(?:, `\w+`)*): (.+)$", section, re.MULTILINE)
    return {key: meaning for keys, meaning in rows for key in re.findall(r"`(\w+)`", keys)}


def told(**settings: Any) -> dict[str, Any]:
    """What stats of some setting say, beside what every chat answer has."""
    return GenerationStats(**settings).as_dict()


def test_the_page_lists_every_key_of_every_kind_of_answer(precedent_engine: Any) -> None:
    llm = ChatPrecedent.from_engine(precedent_engine(["on its way"]))
    answered = llm.invoke("where is it?").response_metadata["speculation"]
    kinds = [
        answered,
        told(mode="lossy_typical"),
        told(extra=Counter(num_lookaheads=3, num_lookaheads_used=1)),
        told(bitwise=True),
    ]
    assert listed_below('`response_metadata["speculation"]`').keys() == set().union(*kinds)

    assert [*listed_below("`latency_microseconds`")] == [*told()["latency_microseconds"]]
    first, *others = ChatPrecedent.from_engine(precedent_engine(["on its way"])).stream("where is it?")
    streamed = sum(others, first).response_metadata["speculation"]
    assert min(answered["estimated_speedup"], streamed["estimated_speedup"]) > 0
