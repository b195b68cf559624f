"""Chat and text models: one answer whichever way it comes, what it says, how models are saved, streams left early.

`tests/golden` records whole messages and streams.
"""

from __future__ import annotations

import asyncio
import gc
import json
import re
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.call_ids import numbered
from helpers.scripted_models import BROKEN, CALL, MODELS, TOKENIZER, Streaming, look_up, merged
from helpers.two_sided import generated, model_of, two_sided_engine
from langchain_core.load import dumpd, dumps, load
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from precedent import SpeculationCache, SpeculationConfig, Templates
from precedent.decoding.stats import GenerationStats
from precedent.engine.engine import Engine
from precedent.errors import UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent.text.prompt import hermes_template
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_engine import ScriptedEngine, chatml_tokenizer
from precedent_testing.scripted_model import scripted_model_engine, scripted_tokenizer

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
    assert told(num_steps=9, plain_seconds=0.9, decode_seconds=1.0)["estimated_speedup"] == 1.0
    assert told(num_steps=9, num_drafts=1, plain_seconds=0.9, decode_seconds=1.0)["estimated_speedup"] == 0.9
    assert told(num_steps=9, decode_seconds=1.0)["estimated_speedup"] is None


# Texts


async def test_a_text_is_continued_on_every_way_with_the_settings_and_the_runs_step() -> None:
    engine: Any = ScriptedEngine(TOKENIZER, lambda prompt: " Paris.", max_burst=2)
    model, heard = PrecedentLLM.from_engine(engine), Streaming()
    config: Any = {"metadata": {"workflow_step": "north"}, "callbacks": [heard]}
    given = "The capital of France is", config
    for text in (
        model.invoke(*given, temperature=0.5),
        await model.ainvoke(*given, temperature=0.5),
        "".join(model.stream(*given, temperature=0.5)),
        "".join([text async for text in model.astream(*given, temperature=0.5)]),
    ):
        assert text == " Paris."
    assert "".join(heard.texts) == " Paris. Paris.", "of the two streams"
    for request in engine.requests:
        assert request.prompt == "The capital of France is", "the prompt is no chat"
        assert (request.workflow_step, request.sampling.temperature) == ("north", 0.5)


async def test_several_texts_run_together_and_stay_in_order() -> None:
    engine: Any = ScriptedEngine(TOKENIZER, lambda prompt: prompt.upper(), pace=0.001)
    model = PrecedentLLM.from_engine(engine, logprobs=True)
    for result in (model.generate(["a", "b", "c"], stop=["X"]), await model.agenerate(["a", "b", "c"])):
        assert [found[0].text for found in result.generations] == ["A", "B", "C"]
        info = result.generations[0][0].generation_info
        assert info is not None
        assert (info["finish_reason"], info["completion_tokens"], info["speculation"]["lossless"]) == ("stop", 2, True)
        assert len(info["logprobs"]["content"]) == 2
    assert engine.requests[0].sampling.stop == ("X",)
    assert ChatPrecedent.from_engine(model.engine).engine is model.engine


def test_prefixes_are_kept_for_chats_alone() -> None:
    with pytest.raises(UnsupportedError, match="keep_prefixes=True is for chat models"):
        PrecedentLLM(model="m", keep_prefixes=True, speculation_cache="orders")


# Encoder-decoder models

WORDED = "monday comes before tuesday"
WORDS = ("▁monday", "▁comes", "▁before", "▁tuesday", "▁", *"abcdefghijklmnopqrstuvwxyz")


def sentencepiece_tokenizer() -> PreTrainedTokenizerFast:
    """A tokenizer in T5's form: pieces with their leading space, padding first, and an end token behind each text."""
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *((word, -1.0 - i) for i, word in enumerate(WORDS))]
    backend = Tokenizer(models.Unigram(pieces, unk_id=2))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always")
    backend.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always")
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>", unk_token="<unk>")


@pytest.fixture(scope="module")
def encoder_decoder() -> Iterator[Engine]:
    tokenizer = sentencepiece_tokenizer()
    model = model_of("t5", vocab_size=len(tokenizer), start=0)
    with closing(two_sided_engine(model=model, tokenizer=tokenizer)) as running:
        yield running


@pytest.mark.filterwarnings("ignore:.*model-agnostic default `max_length`")
async def test_every_way_gives_the_text_of_generate(encoder_decoder: Engine) -> None:
    """invoke, ainvoke, stream, batch; the tokenizer's end token stands behind the text that the encoder reads."""
    expected = generated(encoder_decoder.target.model, encoder_decoder.tokenizer.encode(WORDED), 12, eos_token_id=1)
    text = encoder_decoder.tokenizer.decode(expected, skip_special_tokens=True)
    model = PrecedentLLM.from_engine(encoder_decoder, max_tokens=12)
    assert model.invoke(WORDED) == await model.ainvoke(WORDED) == "".join(model.stream(WORDED)) == text
    assert model.batch([WORDED, "tuesday", WORDED], prediction=text)[::2] == [text, text]
    info = model.generate([WORDED]).generations[0][0].generation_info
    assert (info["prompt_tokens"], info["completion_tokens"]) == (5, len(expected))


async def test_a_chat_model_is_refused_by_name(encoder_decoder: Engine) -> None:
    chat = ChatPrecedent.from_engine(encoder_decoder)
    for call in (lambda: chat.invoke("hi"), lambda: list(chat.stream("hi")), lambda: chat.engine):
        with pytest.raises(UnsupportedError, match=r"is an encoder-decoder model.*use PrecedentLLM") as refused:
            call()
        assert "\n" not in str(refused.value)
    with pytest.raises(UnsupportedError, match="use PrecedentLLM"):
        await chat.ainvoke("hi")


# Streams that are left, and many at once

TEXT = "The order was sent to the new address, and the refund is on its way."
NUM_TOKENS = len(scripted_tokenizer()(TEXT).input_ids) + 1


@MODELS
async def test_leaving_a_stream_or_cancelling_a_task_cancels_the_request(kind: Any) -> None:
    engine: Any = ScriptedEngine(chatml_tokenizer(), lambda prompt: "x" * 3000, max_burst=1, pace=0.001)
    model = kind.from_engine(engine, max_tokens=2000)
    for _ in model.stream("hi"):
        break
    stream = model.astream("hi")
    await anext(stream)
    await stream.aclose()
    task = asyncio.create_task(model.ainvoke("hi"))
    while len(engine.requests) < 3:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for request in engine.requests:
        assert await asyncio.to_thread(request.ended.wait, 10)
        assert request.cancelled


# On a real engine


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    running = scripted_model_engine(lambda prompt: TEXT)
    yield running
    running.close()


def is_idle(engine: Engine) -> bool:
    """True once nothing runs; a later request is answered after whatever was cancelled had left."""
    answer = ChatPrecedent.from_engine(engine).invoke("still there?")
    found = engine.metrics()
    return answer.content == TEXT and found.num_requests_running + found.num_requests_waiting == 0


async def test_a_stream_may_be_left_at_every_chunk(engine: Engine) -> None:
    llm = ChatPrecedent.from_engine(engine, speculation=False)
    llm.invoke("hi")
    before, threads = engine.metrics().num_requests_cancelled, set(threading.enumerate())
    for number in range(1, 6):
        stream, other = llm.stream("hi"), llm.astream("hi")
        for _ in range(number):
            next(stream)
            await anext(other)
            assert not torch.is_inference_mode_enabled(), "nothing of the model's mode reaches the caller"
        if number % 2:
            stream.close()
        else:
            del stream
            gc.collect()
        await other.aclose()  # type: ignore[attr-defined]
    assert await asyncio.to_thread(is_idle, engine)
    assert engine.metrics().num_requests_cancelled == before + 10
    left = {one for one in set(threading.enumerate()) - threads if not one.name.startswith("asyncio")}
    assert not left, "no thread is left behind"


async def test_no_text_from_behind_the_end_token_is_seen() -> None:
    """From the second answer on the cache proposes the whole answer with its end token."""
    with SpeculationCache.open(embedder=HashEmbedder()) as cache:
        engine = scripted_model_engine(lambda prompt: TEXT, cache=cache)
        model = ChatPrecedent.from_engine(engine, logprobs=True)
        events = [one async for one in model.astream_events("Where is my order?", version="v2")]
        answers: list[Any] = [
            merged([one["data"]["chunk"] for one in events if one["event"] == "on_chat_model_stream"]),
            merged(list(model.stream("Where is my order?"))),
            merged([chunk async for chunk in model.astream("Where is my order?")]),
            await model.ainvoke("Where is my order?"),
        ]
        for message in answers:
            assert (message.content, message.response_metadata["finish_reason"]) == (TEXT, "stop")
            assert message.usage_metadata["output_tokens"] == NUM_TOKENS
            assert len(message.response_metadata["logprobs"]["content"]) == NUM_TOKENS
        assert all(one.response_metadata["speculation"]["accepted_by_source"]["recall"] for one in answers[1:])
        engine.close()


@pytest.fixture
def llm(engine: Engine) -> ChatPrecedent:
    return ChatPrecedent.from_engine(engine, speculation=False)


async def test_sixteen_async_streams_half_of_them_cancelled(llm: ChatPrecedent, engine: Engine) -> None:
    async def one(number: int) -> str:
        text = ""
        async for chunk in llm.astream(f"request {number}"):
            text += str(chunk.content)
            if number % 2 and len(text) > number:
                raise asyncio.CancelledError
        return text

    answers = await asyncio.gather(*(asyncio.create_task(one(number)) for number in range(16)), return_exceptions=True)
    assert answers[::2] == [TEXT] * 8
    assert all(isinstance(answer, asyncio.CancelledError) for answer in answers[1::2])
    assert await asyncio.to_thread(is_idle, engine)
