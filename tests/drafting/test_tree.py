"""The candidate tree: its derived arrays, its invariants, and the builder that keeps them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.tree import NULL, ROOT, Fixed, Sampled, TreeBuilder
from precedent_testing.trees import check_tree

UNIFORM = torch.full((4,), 0.25)

steps = st.lists(
    st.tuples(
        st.sampled_from(["fixed", "sampled", "masked sample"]),
        st.integers(0, 10_000),  # picks the parent among the nodes there are
        st.integers(0, 3),  # token
        st.sampled_from(["a", "b"]),  # source
    ),
    max_size=25,
)


def grow(moves: list[tuple[str, int, int, str]]) -> tuple[TreeBuilder, list[tuple[str, int, int, int]]]:
    """Apply the moves; returns the builder and (kind, parent, token, node) of each."""
    builder, done = TreeBuilder(), []
    for kind, pick, token, source in moves:
        parent = pick % (len(builder) + 1) - 1
        if kind == "fixed":
            node = builder.add_fixed(parent, token, source)
        else:
            keep = UNIFORM > 0.5 if kind == "masked sample" and token % 2 else None
            node = builder.add_sampled(parent, token, Sampled(UNIFORM, (), keep), source)
        done.append((kind, parent, token, node))
    return builder, done


@settings(max_examples=150, deadline=None)
@given(steps)
def test_the_builder_keeps_every_invariant(moves: list[tuple[str, int, int, str]]) -> None:
    """Whatever is added in whatever order, `check` passes, every sample is there, and equal prefixes are one node."""
    builder, done = grow(moves)
    tree = builder.build()
    check_tree(tree)
    assert [candidate.child for candidate in tree.candidates if isinstance(candidate.distribution, Sampled)] == [
        node for kind, _, _, node in done if kind != "fixed"
    ]
    for _, parent, token, node in done:
        if node != NULL:
            assert (tree.parents[node], tree.token_ids[node]) == (parent, token)
            assert builder.child(parent, token) == node
            assert token in builder.children(parent)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_derived_arrays_agree_with_walking_up(moves: list[tuple[str, int, int, str]]) -> None:
    """Depths, ancestors, paths and subtrees of fixed candidates alone, each recomputed from the parents alone."""
    tree = grow(moves)[0].build()
    for node in range(len(tree)):
        path = tree.path_to(node)
        assert tree.depths[node] == len(path)
        assert set(tree.ancestors[node].nonzero()[0].tolist()) == set(path)
        assert tree.tokens_to(node) == tuple(tree.token_ids[i] for i in path)
        below = {i for i in range(len(tree)) if tree.ancestors[i, node]}
        assert tree.only_fixed_below[node] == all(
            isinstance(candidate.distribution, Fixed) for candidate in tree.candidates if candidate.parent in below
        )


def test_a_fixed_candidate_beside_a_dropped_sample_keeps_the_parent_mixed() -> None:
    """A dropped sample has a distribution too: its parent may not be verified as if it held fixed candidates only."""
    builder = TreeBuilder()
    node = builder.add_fixed(ROOT, 1, "cache")
    builder.add_fixed(node, 2, "cache")
    assert builder.add_sampled(node, 3, Sampled(UNIFORM, (), UNIFORM > 0.5), "draft") == NULL
    assert builder.build().only_fixed_below == (False, True)


def test_a_token_sampled_and_cached_is_one_node_listed_once_as_sampled() -> None:
    """In either order of adding; both sources are named."""
    for sample_first in (True, False):
        builder = TreeBuilder()
        add = [
            lambda b=builder: b.add_fixed(ROOT, 2, "cache"),
            lambda b=builder: b.add_sampled(ROOT, 2, Sampled(UNIFORM), "draft"),
        ]
        for move in reversed(add) if sample_first else add:
            assert move() == 0
        tree = builder.build()
        assert len(tree) == 1
        assert [type(candidate.distribution) for candidate in tree.candidates] == [Sampled]
        assert set(tree.sources[0]) == {"cache", "draft"}


def test_the_distribution_of_a_sample_excludes_renormalises_and_then_masks() -> None:
    """Exclusion happens before sampling, keep_mask after it."""
    row = torch.tensor([0.5, 0.3, 0.2])
    assert torch.allclose(Sampled(row).probs(), row)
    assert torch.allclose(Sampled(row, (0,)).probs(), torch.tensor([0.0, 0.6, 0.4]))
    masked = Sampled(row, (0,), torch.tensor([True, True, False])).probs()
    assert torch.allclose(masked, torch.tensor([0.0, 0.6, 0.0]))
    assert row.tolist() == pytest.approx([0.5, 0.3, 0.2])
