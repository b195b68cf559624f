"""LangChain on encoder-decoder models: one text becomes another; a chat model on one is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest
from helpers.two_sided import generated, model_of, two_sided_engine
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from precedent.engine.engine import Engine
from precedent.errors import ContextOverflowError, UnsupportedError
from precedent.langchain import ChatPrecedent, PrecedentLLM

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
    other = ChatPrecedent.from_model(engine.target.model, engine.tokenizer)
    with pytest.raises(UnsupportedError, match="use PrecedentLLM"):
        other.invoke("hi")


def test_a_text_that_the_encoder_cannot_read_is_refused() -> None:
    with closing(two_sided_engine("bart")) as running:
        model = PrecedentLLM.from_engine(running)
        with pytest.raises(ContextOverflowError, match=r"600 tokens"):
            model.invoke("x" * 600)
