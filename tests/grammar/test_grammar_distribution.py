"""Under a grammar the distribution is the masked target model's: enumerated on a toy, sampled through the real loop.

The oracle knows no grammar engine: a toy token may follow if some word of a finite language continues that way.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache

import pytest
import torch
from helpers.enumeration import DraftProcess, ExactStep, ToyModel, exact_step
from helpers.known_weights import WAYS, verifier_of
from helpers.random_trees import toy_model
from helpers.stepping import AllCandidates, run, start
from helpers.tabled_model import TabledModel
from llguidance import LLTokenizer, TokenizerWrapper
from scipy.optimize import brentq
from scipy.stats import chi2, ncx2
from torch import Tensor

from precedent.config import SamplingParams
from precedent.decoding.loop import DecodeLoop
from precedent.drafters.grammar import GrammarDrafter
from precedent.drafters.model.drafter import DraftModelDrafter
from precedent.grammar import GrammarConstraint
from precedent.grammar.guidance import GuidanceMatcher, compiled
from precedent.sampling.rng import Rng, entropy_rng
from precedent.sampling.row_shaper import RowShaper
from precedent.sampling.target_rows import TargetRows
from precedent.tree import ROOT, CandidateTree, Sampled, TreeBuilder
from precedent.verify import Decide
from precedent_testing.drafters import OracleDrafter

EXACT = 1e-12
LETTERS, END = "abcd", 4
SIZE = len(LETTERS) + 1
LANGUAGES = ("ab?c|b[ac]d{0,2}|ad", "abc[da]", "[abcd]{1,3}", "(ab|ba)(c|d)?")
WORDS = tuple("".join(letters) for length in range(5) for letters in itertools.product(LETTERS, repeat=length))


class ToyTokenizer:
    """One token per letter and an end token, as llguidance wants to be told of them."""

    eos_token_id, bos_token_id = END, None
    tokens = (*(letter.encode() for letter in LETTERS), b"<end>")
    special_token_ids = (END,)

    def __call__(self, text: bytes) -> list[int]:
        return [LETTERS.index(letter) for letter in text.decode() if letter in LETTERS]


TOKENIZER = LLTokenizer(TokenizerWrapper(ToyTokenizer()))


def constraint(language: str) -> GrammarConstraint:
    start = compiled(TOKENIZER, f"start: TOP\nTOP: /{language}/")
    return GrammarConstraint(GuidanceMatcher(start, SIZE), [END])


@cache
def may_follow(language: str, path: tuple[int, ...]) -> list[int]:
    """The tokens that an unlimited search through the language's words finds."""
    prefix = "".join(LETTERS[token] for token in path)
    words = [word for word in WORDS if re.fullmatch(language, word) and word.startswith(prefix)]
    letters = {word[len(prefix)] for word in words if len(word) > len(prefix)}
    return sorted([*(LETTERS.index(letter) for letter in letters), *([END] if prefix in words else [])])


def masked(distribution: ToyModel, language: str) -> ToyModel:
    """Plain decoding's distribution under the grammar; behind the end, which nobody reads, the model's own."""

    @cache
    def masked_distribution(path: tuple[int, ...]) -> Tensor:
        kept = [] if END in path else may_follow(language, path)
        if not kept:
            return distribution(path)
        row = torch.zeros_like(distribution(path))
        row[kept] = distribution(path)[kept]
        return row / row.sum()

    return masked_distribution


@pytest.mark.parametrize("language", LANGUAGES)
def test_the_toy_masks_are_those_of_a_search_through_the_language(language: str) -> None:
    shape, open_paths = constraint(language), [()]
    for path in open_paths:
        kept = shape(path, torch.zeros(SIZE)).isfinite().nonzero().flatten().tolist()
        assert kept == may_follow(language, path)
        open_paths += [(*path, token) for token in kept if token != END]
    assert len(open_paths) > 4


# Enumeration

PROPOSED = ((0, 1, 2), (0, 3), (1, 0, 3), (2, 1), (0, 1, 2, END), (3,))


def drafts(draft: ToyModel, shape: RowShaper, fixed: Sequence[Sequence[int]]) -> DraftProcess:
    """Fixed candidates, allowed and not, then a chain of up to two samples from a draft model under the constraint."""

    def build(rng: Rng) -> CandidateTree:
        builder = TreeBuilder()
        for path in fixed:
            node = ROOT
            for token in path:
                node = builder.add_fixed(node, token, "cache")
        node, path = ROOT, ()
        while len(path) < 2 and END not in path:
            row = shape(path, draft(path).log()).softmax(0)
            siblings = builder.children(node)
            left = 1.0 - float(row[list(siblings)].sum()) if siblings else 1.0
            distribution = Sampled(row, siblings) if siblings and left > 1e-6 else Sampled(row)
            token = rng.categorical(distribution.probs(), node, "draft")
            node, path = builder.add_sampled(node, token, distribution, "draft-model"), (*path, token)
        return builder.build()

    return build


def exact_constrained_step(
    target: ToyModel,
    language: str,
    draft: DraftProcess,
    mode: str,
    shape_of: Callable[[RowShaper], RowShaper] = lambda shape: shape,
    *,
    way: str = "row by row",
) -> ExactStep:
    """The shipped rows and the shipped verifier, down every branch of all random numbers."""
    shape = shape_of(constraint(language))
    verifier = verifier_of(mode, way)

    def prepare(tree: CandidateTree, _: TargetRows) -> Decide:
        logits = torch.stack([target(tree.tokens_to(node)).log() for node in range(ROOT, len(tree))])
        return verifier(tree, TargetRows(logits, tree, SamplingParams(temperature=1.0), (), shape))

    return exact_step(masked(target, language), draft, prepare)


def problems() -> list[tuple[int, str]]:
    return [(seed, language) for seed in range(4) for language in LANGUAGES]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_sampled_and_fixed_candidates_under_a_grammar_keep_the_masked_distribution(mode: str, way: str) -> None:
    for seed, language in problems():
        target, draft = (toy_model(f"{name} {seed}", SIZE, plain=True) for name in ("target", "draft"))
        proposals = drafts(draft, constraint(language), PROPOSED)
        done = exact_constrained_step(target, language, proposals, mode, way=way)
        assert done.total_variation(masked(target, language)) < EXACT, (seed, language)


@pytest.mark.parametrize("mode", ["traversal", "topdown"])
def test_forced_tokens_never_change_the_distribution(mode: str) -> None:
    """What is forced is a fixed candidate like any other: accepted for certain, with the same distribution."""
    for seed, language in problems():
        target, draft = (toy_model(f"{name} {seed}", SIZE, plain=True) for name in ("target", "draft"))
        shape = constraint(language)
        forced = shape.forced(())
        done = exact_constrained_step(target, language, drafts(draft, shape, [forced] if forced else []), mode)
        assert done.total_variation(masked(target, language)) < EXACT, (seed, language)
        assert all(prefix[: len(forced)] == forced for prefix in done.prefixes)
    assert constraint("abc[da]").forced(()) == (0, 1, 2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda shape: lambda output_ids, row: row,
        lambda shape: (
            lambda output_ids, row: shape((), row) if output_ids and output_ids[0] == 0 else shape(output_ids, row)
        ),
        lambda shape: lambda output_ids, row: shape(output_ids, row) if not output_ids else row,
    ],
    ids=["no mask", "the mask of the committed text at its nodes", "no mask below the root"],
)
def test_masks_that_are_not_the_nodes_own_are_seen(wrong: Callable[[RowShaper], RowShaper]) -> None:
    """The mistakes that engines make under speculation fail the same comparison."""
    target, draft = (toy_model(name, SIZE, plain=True) for name in ("target", "draft"))
    proposals = drafts(draft, constraint(LANGUAGES[0]), PROPOSED)
    done = exact_constrained_step(target, LANGUAGES[0], proposals, "traversal", wrong)
    assert done.total_variation(masked(target, LANGUAGES[0])) > 1e-3


# The real loop

PROMPT, LANGUAGE = (0, 1), LANGUAGES[0]
SAMPLING = SamplingParams(temperature=1.0, max_tokens=8)
FALSE_ALARM, POWER = 1e-5, 0.99


def answers_needed(total_variation: float, critical: float, freedom: int) -> int:
    """Answers after which any bias of this total variation is seen with `POWER` (see test_verify_loop.py)."""
    needed = brentq(lambda noncentrality: ncx2.sf(critical, freedom, noncentrality) - POWER, 1.0, 1000.0)
    return math.ceil(needed / (2 * total_variation) ** 2)


def answer(target: TabledModel, draft: TabledModel, entropy: int, loop: DecodeLoop) -> tuple[int, ...]:
    """One answer through the loop under a grammar, proposed by a cached text, forced tokens and a draft model."""
    drafters = [OracleDrafter([1, 2, 3, END]), GrammarDrafter(), DraftModelDrafter(draft)]  # type: ignore[arg-type]
    given = {"prompt": PROMPT, "mode": "traversal", "shape": constraint(LANGUAGE), "ends": frozenset({END})}
    return run(target, start(target, drafters, SAMPLING, rng_of=entropy_rng(entropy), **given), loop)


def exact_words(target: ToyModel) -> dict[tuple[int, ...], float]:
    """Every word of the language with its end, and the probability of plain decoding under the grammar."""
    distribution, found = masked(target, LANGUAGE), {}
    for word in WORDS:
        if re.fullmatch(LANGUAGE, word):
            path = (*(LETTERS.index(letter) for letter in word), END)
            found[path] = math.prod(float(distribution(path[:count])[token]) for count, token in enumerate(path))
    return found


def test_answers_through_the_loop_have_the_masked_distribution_by_a_g_test() -> None:
    """Sees a total variation of 15 %, as the same answers show against a distribution moved by that much."""
    distributions = [toy_model(name, SIZE, plain=True) for name in ("target of the loop", "draft of the loop")]
    target, draft = (
        TabledModel(lambda ids, distribution=distribution: distribution(ids[len(PROMPT) :]).log())
        for distribution in distributions
    )
    expected = exact_words(distributions[0])
    assert sum(expected.values()) == pytest.approx(1.0, abs=EXACT)
    critical = float(chi2.isf(FALSE_ALARM, len(expected) - 1))
    count, loop = answers_needed(0.15, critical, len(expected) - 1), DecodeLoop(target, AllCandidates(2))
    with torch.inference_mode():
        observed = Counter(answer(target, draft, entropy, loop) for entropy in range(count))
    assert set(observed) <= set(expected)
    likeliest = max(expected, key=expected.__getitem__)
    moved = {path: share + 0.15 / (len(expected) - 1) for path, share in expected.items()}
    moved[likeliest] = expected[likeliest] - 0.15
    assert g_statistic(observed, expected) < critical < g_statistic(observed, moved)


def g_statistic(observed: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> float:
    """2 sum observed log(observed / expected)."""
    return 2 * sum(seen * math.log(seen / (observed.total() * distribution[path])) for path, seen in observed.items())
