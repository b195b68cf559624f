"""Nothing is unpickled but machine code that numba keeps: no module calls for it."""

from __future__ import annotations

import ast
from pathlib import Path

import precedent

PACKAGE = Path(precedent.__file__).parent

FORBIDDEN = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}

MACHINE_CODE = PACKAGE / "runtime" / "compiled.py"
"""The one exception, for what numba keeps is made of pickles: it reads no other file, and none without its checksum.

That finds damage, not an attacker: who can write to that folder could plant machine code itself.
"""


def problems_of(file: Path) -> list[str]:
    """Imports of modules of pickles, and loaders of arrays or tensors that are not told to refuse them."""
    found = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        imported = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        imported += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in imported if name.split(".")[0] in FORBIDDEN]
        if isinstance(node, ast.Call):
            name, words = ast.unparse(node.func), {word.arg: ast.unparse(word.value) for word in node.keywords}
            refused = {"load": {"allow_pickle": "False"}, "torch.load": {"weights_only": "True"}}
            loads = name == "torch.load" or (name in ("np.load", "numpy.load") and "allow_pickle" in words)
            if loads and not refused[name if name == "torch.load" else "load"].items() <= words.items():
                found.append(ast.unparse(node))
            if name.rsplit(".", 1)[-1] in ("read_index", "deserialize_index") or name.startswith("pickle."):
                found.append(ast.unparse(node))
    return found


def test_nothing_is_unpickled() -> None:
    found = {file: problems for file in PACKAGE.rglob("*.py") if (problems := problems_of(file))}
    of_numba = found.pop(MACHINE_CODE)
    assert found == {}
    assert of_numba[0] == "pickle"
    assert all(problem.startswith("pickle.loads(unsealed(") for problem in of_numba[1:])
