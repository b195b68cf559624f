"""The invariants of a candidate tree."""

from __future__ import annotations

from precedent.tree import NULL, ROOT, Candidate, CandidateTree, Fixed, Sampled


def check_tree(tree: CandidateTree) -> None:
    """Raise ValueError if an invariant of the tree is broken."""
    if not (len(tree.token_ids) == len(tree.parents) == len(tree.sources)):
        raise ValueError("token_ids, parents and sources differ in length")
    if any(not ROOT <= parent < node for node, parent in enumerate(tree.parents)):
        raise ValueError("a parent does not precede its child")
    if len(set(zip(tree.parents, tree.token_ids, strict=True))) != len(tree):
        raise ValueError("two siblings carry the same token: a shared prefix must be one node")
    if {candidate.child for candidate in tree.candidates} - {NULL} != set(range(len(tree))):
        raise ValueError("a node has no candidate, or a candidate has no node")
    for parent, candidates in tree.candidates_at.items():
        _check_siblings(tree, parent, candidates)


def _check_siblings(tree: CandidateTree, parent: int, candidates: tuple[Candidate, ...]) -> None:
    if not ROOT <= parent < len(tree):
        raise ValueError(f"a candidate hangs below node {parent}, which does not exist")
    if any(each.child != NULL and tree.parents[each.child] != parent for each in candidates):
        raise ValueError(f"a candidate below node {parent} names a child of another node")
    kinds = [isinstance(each.distribution, Fixed) for each in candidates]
    if kinds != sorted(kinds):
        raise ValueError(f"below node {parent} a fixed candidate comes before a sampled one")
    fixed = [each.child for each in candidates if isinstance(each.distribution, Fixed)]
    sampled = [each.child for each in candidates if isinstance(each.distribution, Sampled)]
    if len(set(fixed)) != len(fixed) or set(fixed) & set(sampled):
        raise ValueError(f"below node {parent} a fixed token is listed twice: list it once, and not beside a sample")
    for candidate in candidates:
        _check_distribution(tree, candidate)


def _check_distribution(tree: CandidateTree, candidate: Candidate) -> None:
    distribution, parent = candidate.distribution, candidate.parent
    if isinstance(distribution, Fixed):
        if candidate.child == NULL:
            raise ValueError(f"a fixed candidate below node {parent} has no node")
    elif candidate.child == NULL:
        if distribution.keep_mask is None:
            raise ValueError(f"a sample below node {parent} proposed nothing, but its distribution has no keep_mask")
    elif not float(distribution.probs()[tree.token_ids[candidate.child]]) > 0.0:
        raise ValueError(f"below node {parent} a token was sampled to which its distribution gives no probability")
