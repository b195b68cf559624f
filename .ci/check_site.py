"""Fails if a page of the built site would load a script, a style, a font or a picture from another host.

`python .ci/check_site.py build/docs`
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LOADED = re.compile(
    r"""<(?:script|img|iframe|source|link)\b[^>]*?(?:src|href)=["'](?:https?:)?//[^"']*|url\(["']?(?:https?:)?//[^)]*|@import[^;]*//[^;]*"""
)


def loaded_from_outside(folder: Path) -> list[str]:
    """Each place in the pages and styles of a site that names another host to load from."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in {".html", ".css"})
    return [f"{path}: {found}" for path in files for found in LOADED.findall(path.read_text(encoding="utf-8"))]


if __name__ == "__main__":
    wrong = loaded_from_outside(Path(sys.argv[1]))
    print("\n".join(wrong) or "nothing is loaded from outside")
    sys.exit(bool(wrong))
