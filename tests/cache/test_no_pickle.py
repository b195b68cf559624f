"""Nothing is unpickled but machine code that numba keeps: no module calls for it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import precedent

PACKAGE = Path(precedent.__file__).parent


FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

MACHINE_CODE = "runtime/compiled.py"
"""The one exception, for what numba keeps is made of pickles: it reads no other file, and none without its checksum.

That finds damage, not an attacker: who can write to that folder could plant machine code itself.
"""


def calls_in(tree: ast.AST) -> Iterator[tuple[str, dict[str, ast.expr]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), {word.arg: word.value for word in node.keywords if word.arg}


def uses_pickle(node: ast.AST) -> bool:
    """Whether it is a call of something in the module, the module under another name, or one of its names."""
    if isinstance(node, ast.Call):
        return ast.unparse(node.func).startswith("pickle.")
    if isinstance(node, ast.Import):
        return any(alias.name == "pickle" and alias.asname for alias in node.names)
    return isinstance(node, ast.ImportFrom) and node.module == "pickle"


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: file.relative_to(PACKAGE).as_posix())
def test_nothing_is_unpickled(file):
    """No module of pickles is imported, and whatever loads arrays or tensors is told to refuse them."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree))
    imported = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    imported |= {(node.module or "").split(".")[0] for node in nodes if isinstance(node, ast.ImportFrom)}
    allowed = {"pickle"} if file == PACKAGE / MACHINE_CODE else set()
    assert imported & FORBIDDEN <= allowed
    assert all(ast.unparse(node).startswith("pickle.loads(unsealed(") for node in nodes if uses_pickle(node))
    for name, keywords in calls_in(tree):
        last = name.rsplit(".", 1)[-1]
        if name in ("np.load", "numpy.load"):
            assert ast.unparse(keywords.get("allow_pickle", ast.Constant(False))) == "False", name
        if name == "torch.load":
            assert ast.unparse(keywords["weights_only"]) == "True", name
        assert last not in ("read_index", "deserialize_index"), f"{name} trusts the bytes it reads"
