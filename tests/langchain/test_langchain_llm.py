"""PrecedentLLM: a text goes to the model as it is, and comes back continued, or as another text (encoder-decoder)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from helpers.order_chat import TOKENIZER, Streaming
from helpers.two_sided import generated, model_of, two_sided_engine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from precedent.engine.engine import Engine
from precedent.errors import UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM
from precedent_testing.scripted_engine import ScriptedEngine


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

TEXT = "monday comes before tuesday"
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
def engine() -> Iterator[Engine]:
    tokenizer = sentencepiece_tokenizer()
    model = model_of("t5", vocab_size=len(tokenizer), start=0)
    with closing(two_sided_engine(model=model, tokenizer=tokenizer)) as running:
        yield running


@pytest.mark.filterwarnings("ignore:.*model-agnostic default `max_length`")
async def test_every_way_gives_the_text_of_generate(engine: Engine) -> None:
    """invoke, ainvoke, stream, batch; the tokenizer's end token stands behind the text that the encoder reads."""
    expected = generated(engine.target.model, engine.tokenizer.encode(TEXT), 12, eos_token_id=1)
    text = engine.tokenizer.decode(expected, skip_special_tokens=True)
    model = PrecedentLLM.from_engine(engine, max_tokens=12)
    assert model.invoke(TEXT) == await model.ainvoke(TEXT) == "".join(model.stream(TEXT)) == text
    assert model.batch([TEXT, "tuesday", TEXT], prediction=text)[::2] == [text, text]
    info = model.generate([TEXT]).generations[0][0].generation_info
    assert (info["prompt_tokens"], info["completion_tokens"]) == (5, len(expected))


async def test_a_chat_model_is_refused_by_name(engine: Engine) -> None:
    chat = ChatPrecedent.from_engine(engine)
    for call in (lambda: chat.invoke("hi"), lambda: list(chat.stream("hi")), lambda: chat.engine):
        with pytest.raises(UnsupportedError, match=r"is an encoder-decoder model.*use PrecedentLLM") as refused:
            call()
        assert "\n" not in str(refused.value)
    with pytest.raises(UnsupportedError, match="use PrecedentLLM"):
        await chat.ainvoke("hi")
