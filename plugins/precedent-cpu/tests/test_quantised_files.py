"""Tiny GGUF files of every type of blocks: the same bits however a row is computed, and the numbers of float64."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from helpers.packed_checkpoints import write_packed
from helpers.row_models import DIM, model_by_rows
from helpers.stepping import AllCandidates, run, start
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2
from torch import Tensor

from precedent import Engine
from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.errors import UnsupportedError
from precedent.sampling.rng import entropy_rng
from precedent.target import TargetModel
from precedent.target.load.loading import load_target
from precedent.tree import EMPTY_TREE, ROOT, CandidateTree, TreeBuilder
from precedent_cpu.codes import FORMATS
from precedent_cpu.row_attention import fits
from precedent_testing.drafters import OracleDrafter, RandomDrafter
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

pytestmark = pytest.mark.skipif(
    not fits(*[torch.zeros(1, 1, 1, DIM)] * 3), reason="torch runs on other threads here, or lacks fused operations"
)

VOCABULARY = 260
MIXED = "a Q4_K_M file's mix"
TYPES = {kind: {"": kind} for kind in FORMATS} | {MIXED: {"token_embd": "Q6_K", "blk.0.ffn_down": "Q6_K", "": "Q4_K"}}


@pytest.fixture(scope="module", params=TYPES)
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, small enough that float64 can follow them."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    shape["num_attention_heads"] = 256 // DIM  # k-quants come in blocks of 256
    model = model_by_rows("llama", torch.float32, **shape)
    tokenizer = byte_tokenizer((("t", "h"),))
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", model, tokenizer, kind=TYPES[request.param])


@pytest.fixture(scope="module")
def target(file: Path) -> TargetModel:
    return TargetModel(load_target(file, device="cpu")[0])


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@st.composite
def computed(draw: st.DrawFn) -> tuple[list[int], list[int], CandidateTree, int]:
    """A prompt, where its prefill is cut, a tree of up to 63 nodes, and a number of threads."""
    length, token = draw(st.integers(2, 160)), st.integers(0, VOCABULARY - 1)
    choose = draw(st.randoms(use_true_random=False))
    prompt = [choose.randrange(VOCABULARY) for _ in range(length)]
    cuts = sorted(draw(st.sets(st.integers(1, length - 1), max_size=5)))
    builder, nodes = TreeBuilder(), [ROOT]
    for _ in range(draw(st.integers(0, 63))):
        nodes.append(
            builder.add_fixed(
                choose.choice(nodes[-8:]), draw(token) if len(nodes) < 4 else choose.randrange(VOCABULARY), "test"
            )
        )
    return prompt, cuts, builder.build(), draw(st.integers(1, 4))


@pytest.mark.sampled(3)
@settings(max_examples=4)
@given(case=computed())
def test_a_row_has_the_same_bits_among_any_rows_threads_and_pieces(
    target: TargetModel, case: tuple[list[int], list[int], CandidateTree, int]
) -> None:
    """Every row of a tree behind a prompt in pieces equals decoding token by token with one thread."""
    prompt, cuts, tree, threads = case
    torch.set_num_threads(threads)
    slot = target.new_slot()
    for end in (*(cut + 1 for cut in cuts), len(prompt)):
        target.prefill(slot, prompt[:end])
    rows = target.score([(slot, tree)])[0].clone()
    torch.set_num_threads(1)
    for node in {ROOT, len(tree) // 2 - 1, len(tree) - 1} if len(tree) else {ROOT}:
        path = list(tree.tokens_to(node)) if node != ROOT else []
        assert torch.equal(decoded(target, prompt, path), rows[node + 1])


def decoded(target: TargetModel, prompt: list[int], path: list[int]) -> Tensor:
    """Logits after the prompt and a path, the last twelve tokens one by one."""
    ids = prompt + path
    slot, first = target.new_slot(), max(1, len(ids) - 12)
    target.prefill(slot, ids[:first])
    for token in ids[first:]:
        target.plain_step(slot)
        target.commit(slot, EMPTY_TREE, (), token)
    return target.plain_step(slot)[0]


@pytest.mark.sampled(4)
def test_logits_are_near_those_of_the_dequantised_model_in_float64(file: Path, target: TargetModel) -> None:
    """What is left is the rounding of inputs to eight bits: a scale for 32 of them."""
    prompt = [(7 * number + number // 5) % VOCABULARY for number in range(60)]
    exact = TargetModel(load_target(file, device="cpu", dtype="float64")[0])
    found, expected = (logits(one, prompt).double() for one in (target, exact))
    assert (found - expected).norm() <= 0.05 * expected.norm()
    assert (found - expected).norm() > 0


def logits(target: TargetModel, prompt: list[int]) -> Tensor:
    """After the prompt, and after each of 40 other tokens."""
    slot, builder = target.new_slot(), TreeBuilder()
    target.prefill(slot, prompt)
    for token in range(40):
        builder.add_fixed(ROOT, token, "test")
    return target.score([(slot, builder.build())])[0]


@pytest.mark.parametrize("file", [MIXED], indirect=True)
def test_sampled_texts_have_the_targets_distribution(target: TargetModel) -> None:
    """Pairs of tokens in 16 classes, sampled with right and wrong drafts, by a chi-square test."""
    prompt, count, temperature = [11, 7, 200, 31], 400, 0.7
    first, second = probabilities(target, prompt, temperature)
    classes = torch.arange(VOCABULARY) % 4
    expected = torch.zeros(4, 4, dtype=torch.float64)
    for row in range(4):
        for column in range(4):
            expected[row, column] = (first[:, None] * second)[classes == row][:, classes == column].sum()
    likely = [int(first.argmax()), int(second[first.argmax()].argmax())]
    loop, drafters = DecodeLoop(target, AllCandidates()), [OracleDrafter(likely), RandomDrafter(VOCABULARY)]
    sampling = SamplingParams(temperature=temperature, max_tokens=2)
    seen: Counter[tuple[int, int]] = Counter()
    for number in range(count):
        sequence = start(target, drafters, sampling, prompt=prompt, rng_of=entropy_rng(number), ends=frozenset())
        one, other = run(target, sequence, loop)
        seen[one % 4, other % 4] += 1
    statistic = sum(
        (seen[pair] - count * p) ** 2 / (count * p)
        for pair, p in ((divmod(n, 4), float(expected.flatten()[n])) for n in range(16))
    )
    assert math.isclose(float(expected.sum()), 1.0, abs_tol=1e-6)
    assert statistic < chi2.isf(1e-5, 15)


def probabilities(target: TargetModel, prompt: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    """Of the first token, and of the second by the first, `[vocabulary, vocabulary]`."""
    slot, found = target.new_slot(), []
    target.prefill(slot, prompt)
    first = (target.plain_step(slot)[0].double() / temperature).softmax(0)
    target.discard(slot)
    for start_id in range(0, VOCABULARY, 52):
        builder = TreeBuilder()
        for token in range(start_id, start_id + 52):
            builder.add_fixed(ROOT, token, "test")
        found.append((target.score([(slot, builder.build())])[0][1:].double() / temperature).softmax(-1))
        target.discard(slot)
    return first, torch.cat(found)


@pytest.mark.parametrize("file", [MIXED], indirect=True)
def test_a_file_may_be_computed_with_accurate_inputs(file: Path, target: TargetModel) -> None:
    prompt = [(7 * number + number // 5) % VOCABULARY for number in range(60)]
    exact, accurate = (
        logits(TargetModel(load_target(file, device="cpu", **how)[0]), prompt).double()
        for how in ({"dtype": "float64"}, {"accurate": True})
    )
    assert (accurate - exact).norm() < 0.02 * (logits(target, prompt) - exact).norm()


@pytest.mark.parametrize("file", [MIXED], indirect=True)
@pytest.mark.parametrize("how", [{}, {"accurate": True}])
def test_bitwise_answers_are_the_same_with_drafts_and_without(file: Path, how: dict[str, bool]) -> None:
    """Greedy and seeded."""
    found = []
    for draft_model in (None, "first-layers:1"):
        with closing(Engine.load(file, device="cpu", bitwise=True, draft_model=draft_model, **how)) as engine:
            for sampling in (SamplingParams(max_tokens=24), SamplingParams(temperature=0.8, seed=3, max_tokens=24)):
                result = engine.submit([11, 7, 200, 31], sampling).result()
                assert result.stats.bitwise
                found.append(result.token_ids)
    assert found[:2] == found[2:]


def test_bitwise_is_refused_for_quantised_mixtures_and_permuted_inputs_by_name(tmp_path: Path) -> None:
    """Their layers run module by module."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 4, "num_experts_per_tok": 2}
    mixture = tiny_causal_lm("qwen3_moe", dtype=torch.float32, vocab_size=VOCABULARY, head_dim=DIM, **sizes)
    tokenizer = byte_tokenizer((("t", "h"),))
    file = write_gguf(tmp_path / "moe.gguf", mixture, tokenizer, architecture="qwen3moe", kind="Q8_0")
    with pytest.raises(UnsupportedError, match="not available for this qwen3_moe: 3 of its 3 layers have no row-wise"):
        TargetModel(load_target(file, device="cpu")[0], bitwise=True)
    write_packed(tmp_path, "gptq act-order")
    with pytest.raises(UnsupportedError, match="not available for this llama: 3 of its 3 layers have no row-wise"):
        TargetModel(load_target(tmp_path, device="cpu")[0], bitwise=True)


@pytest.mark.parametrize("file", [MIXED], indirect=True)
def test_weights_that_cannot_be_packed_are_computed_without_kernels(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A fault simulated: a kernel that does not compile on some processor."""

    def fails(*_: object) -> None:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr("precedent_cpu.quantised_weights.PackedWeight.__init__", fails)
    prompt = list(range(20))
    found, exact = (TargetModel(load_target(file, device="cpu", **how)[0]) for how in ({}, {"dtype": "float64"}))
    expected = logits(exact, prompt)
    assert (logits(found, prompt).double() - expected).norm() <= 1e-4 * expected.norm()
    assert "runs without kernels, which is slow: RuntimeError('no such instruction')" in caplog.text
