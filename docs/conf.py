"""How `make docs` builds the site. Pages are plain Markdown, and nothing on them is loaded from another host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from pygments.lexers.special import TextLexer

from precedent import __version__

if TYPE_CHECKING:
    from sphinx.application import Sphinx

project = "Precedent"
author = "the Precedent authors"
release = __version__
extensions = ["myst_parser"]
nitpicky = True  # a name that does not exist fails the build
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"Precedent {release}"
html_copy_source = False
html_show_sphinx = False


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Let the links of an index page, in their order, be the site's navigation; Markdown has no word for that."""
    if Path(page).name != "index":
        return
    links = re.findall(r"\]\(([\w/.-]+)\.md\)", source[0])
    folder = Path(app.srcdir, page).parent
    rest = sorted(path.stem for path in folder.glob("*.md") if path.stem[:4].isdigit())  # decisions
    entries = "\n".join([*dict.fromkeys(link for link in links if not link.startswith("..")), *rest])
    source[0] += f"\n\n```{{toctree}}\n:hidden:\n\n{entries}\n```\n"


def link_to_files(app: Sphinx, page: str, source: list[str]) -> None:
    """Let a link to Markdown outside of the site lead to the file, as links to other files do."""

    def replaced(link: re.Match[str]) -> str:
        target = (Path(app.srcdir, page).parent / link[1]).resolve()
        return link[0] if target.is_relative_to(app.srcdir) else f"](path:{link[1]})"

    source[0] = re.sub(r"\]\((\.\./[^)#]*\.md)(?:#[^)]*)?\)", replaced, source[0])


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", add_contents)
    app.connect("source-read", link_to_files)
    app.add_lexer("mermaid", TextLexer)  # drawn on code hosts; here, drawing it would take a script from outside
