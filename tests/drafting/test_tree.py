"""The candidate tree: its derived arrays, its invariants, and the builder that keeps them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from precedent.tree import EMPTY_TREE, NULL, ROOT, CandidateTree, Draw, Drawn, Point, TreeBuilder, chain

UNIFORM = torch.full((4,), 0.25)

steps = st.lists(
    st.tuples(
        st.sampled_from(["point", "draw", "kept draw"]),
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
        if kind == "point":
            node = builder.add_point(parent, token, source)
        else:
            keep = UNIFORM > 0.5 if kind == "kept draw" and token % 2 else None
            node = builder.add_draw(parent, token, Drawn(UNIFORM, (), keep), source)
        done.append((kind, parent, token, node))
    return builder, done


@settings(max_examples=150, deadline=None)
@given(steps)
def test_the_builder_keeps_every_invariant(moves: list[tuple[str, int, int, str]]) -> None:
    """Whatever is added in whatever order, `check` passes, every draw is there, and equal prefixes are one node."""
    builder, done = grow(moves)
    tree = builder.build()
    tree.check()
    assert [draw.child for draw in tree.draws if isinstance(draw.law, Drawn)] == [
        node for kind, _, _, node in done if kind != "point"
    ]
    for _, parent, token, node in done:
        if node != NULL:
            assert (tree.parents[node], tree.token_ids[node]) == (parent, token)
            assert builder.child(parent, token) == node
            assert token in builder.children(parent)


@settings(max_examples=150, deadline=None)
@given(steps)
def test_derived_arrays_agree_with_walking_up(moves: list[tuple[str, int, int, str]]) -> None:
    """Depths, ancestors, paths and point-only subtrees, each recomputed from the parents alone."""
    tree = grow(moves)[0].build()
    for node in range(len(tree)):
        path = tree.path_to(node)
        assert tree.depths[node] == len(path)
        assert set(tree.ancestors[node].nonzero()[0].tolist()) == set(path)
        assert tree.tokens_to(node) == tuple(tree.token_ids[i] for i in path)
        below = {i for i in range(len(tree)) if tree.ancestors[i, node]}
        assert tree.all_points_below[node] == all(
            isinstance(draw.law, Point) for draw in tree.draws if draw.parent in below
        )


def test_the_empty_tree_and_the_root() -> None:
    """No candidates is a legal tree."""
    EMPTY_TREE.check()
    assert len(EMPTY_TREE) == 0
    assert EMPTY_TREE.path_to(ROOT) == ()
    assert EMPTY_TREE.draws_at == {}
    assert EMPTY_TREE.depths.shape == (0,)
    assert EMPTY_TREE.ancestors.shape == (0, 0)


def test_a_point_below_a_swallowed_draw_keeps_the_parent_impure() -> None:
    """A swallowed draw has a law too: its parent may not be verified as if it held points only."""
    builder = TreeBuilder()
    node = builder.add_point(ROOT, 1, "cache")
    builder.add_point(node, 2, "cache")
    assert builder.add_draw(node, 3, Drawn(UNIFORM, (), UNIFORM > 0.5), "draft") == NULL
    assert builder.build().all_points_below == (False, True)


def test_a_token_drawn_and_cached_is_one_node_listed_once_as_drawn() -> None:
    """In either order of adding; both sources are named."""
    for draw_first in (True, False):
        builder = TreeBuilder()
        add = [
            lambda b=builder: b.add_point(ROOT, 2, "cache"),
            lambda b=builder: b.add_draw(ROOT, 2, Drawn(UNIFORM), "draft"),
        ]
        for move in reversed(add) if draw_first else add:
            assert move() == 0
        tree = builder.build()
        assert len(tree) == 1
        assert [type(draw.law) for draw in tree.draws] == [Drawn]
        assert set(tree.sources[0]) == {"cache", "draft"}


def test_duplicate_draws_are_never_dropped() -> None:
    """Two draws of one token with replacement: one node, two laws."""
    builder = TreeBuilder()
    first, second = Drawn(UNIFORM), Drawn(UNIFORM)
    assert builder.add_draw(ROOT, 1, first, "draft") == builder.add_draw(ROOT, 1, second, "draft") == 0
    tree = builder.build()
    assert [draw.law for draw in tree.draws_at[ROOT]] == [first, second]
    assert len(tree) == 1


def test_the_law_of_a_draw_excludes_renormalises_and_then_swallows() -> None:
    """Exclusion happens before the draw, keep_mask after it."""
    row = torch.tensor([0.5, 0.3, 0.2])
    assert torch.allclose(Drawn(row).probs(), row)
    assert torch.allclose(Drawn(row, (0,)).probs(), torch.tensor([0.0, 0.6, 0.4]))
    masked = Drawn(row, (0,), torch.tensor([True, True, False])).probs()
    assert torch.allclose(masked, torch.tensor([0.0, 0.6, 0.0]))
    assert row.tolist() == pytest.approx([0.5, 0.3, 0.2])


def test_a_chain_is_one_path_of_points() -> None:
    tree = chain([5, 5, 7], "prompt")
    tree.check()
    assert tree.tokens_to(2) == (5, 5, 7)
    assert tree.sources[1] == ("prompt",)
    assert all(tree.all_points_below)


SOUND = CandidateTree((1, 2), (ROOT, 0), (Draw(ROOT, 0, Drawn(UNIFORM)), Draw(0, 1, Point())), (("draft",), ("cache",)))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (replace(SOUND, sources=()), "differ in length"),
        (replace(SOUND, parents=(ROOT, 1)), "does not precede"),
        (replace(SOUND, token_ids=(1, 1), parents=(ROOT, ROOT)), "same token"),
        (replace(SOUND, draws=SOUND.draws[:1]), "no draw"),
        (replace(SOUND, draws=(*SOUND.draws, Draw(7, NULL, Drawn(UNIFORM, (), UNIFORM > 1)))), "does not exist"),
        (replace(SOUND, draws=(Draw(0, 0, Point()), Draw(0, 1, Point()))), "child of another node"),
        (
            replace(SOUND, parents=(ROOT, ROOT), draws=(Draw(ROOT, 1, Point()), SOUND.draws[0])),
            "point stands before a drawn sibling",
        ),
        (replace(SOUND, draws=(*SOUND.draws, Draw(0, 1, Point()))), "listed twice"),
        (replace(SOUND, draws=(SOUND.draws[0], Draw(0, 1, Drawn(UNIFORM)), Draw(0, 1, Point()))), "listed twice"),
        (replace(SOUND, draws=(*SOUND.draws, Draw(ROOT, NULL, Point()))), "no node"),
        (replace(SOUND, draws=(*SOUND.draws, Draw(1, NULL, Drawn(UNIFORM)))), "no keep_mask"),
        (replace(SOUND, draws=(Draw(ROOT, 0, Drawn(UNIFORM, (1,))), SOUND.draws[1])), "gives it no probability"),
    ],
)
def test_check_names_what_is_broken(broken: CandidateTree, message: str) -> None:
    SOUND.check()
    with pytest.raises(ValueError, match=message):
        broken.check()
