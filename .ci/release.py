"""Gives every package the next version, dates the changelog, and makes the commit and the tag of the release.

    python .ci/release.py 0.1.0

Pushing the tag publishes (.github/workflows/publish.yml): git push origin main v0.1.0
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
VERSION = re.compile(r"\d+\.\d+\.\d+(?:(?:a|b|rc)\d+)?")
UNRELEASED = "(unreleased)"


def named_version(root: Path) -> str:
    """The version that the sources name."""
    (found,) = re.findall(r'^__version__ = "(.+)"$', (root / "src/precedent/__init__.py").read_text("utf-8"), re.M)
    return str(found)


def rewritten(root: Path, new: str, today: date) -> dict[Path, str]:
    """The files that name a version, with the texts they get; ValueError where the changelog holds nothing unreleased.

    Those are `__version__` of modules, and `version` and our own pins (`precedent-…==`) in every pyproject.toml.
    """
    old = re.escape(named_version(root))
    named = re.compile(rf'(^(?:__)?version(?:__)? = "|precedent-[a-z-]+(?:\[[a-z,-]+\])?==){old}(?=["; ])', re.M)
    files = [*root.glob("src/*/__init__.py"), *root.glob("plugins/*/src/*/__init__.py")]
    files += [root / "pyproject.toml", *root.glob("plugins/*/pyproject.toml")]
    texts = {path: path.read_text("utf-8") for path in files}
    texts = {path: named.sub(rf"\g<1>{new}", text) for path, text in texts.items() if named.search(text)}
    changelog = root / "CHANGELOG.md"
    heading, rest = re.split(r"(?<=^# Changelog\n\n)", changelog.read_text("utf-8"), maxsplit=1, flags=re.M)
    first, rest = rest.split("\n", 1)
    if UNRELEASED not in first:
        raise ValueError(f'CHANGELOG.md begins with "{first}": write what is new under "## {new} {UNRELEASED}" first')
    return texts | {changelog: f"{heading}## {new} ({today.isoformat()})\n{rest}"}


def git(*arguments: str) -> str:
    """What git prints; a command that fails ends this program."""
    return subprocess.run(("git", *arguments), cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def main(arguments: Sequence[str] | None = None) -> None:
    """Rewrite the files, commit and tag."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("version")
    new = parser.parse_args(arguments).version
    if not VERSION.fullmatch(new):
        sys.exit(f"'{new}' is no version such as 0.2.0 or 0.2.0rc1")
    if git("status", "--porcelain"):
        sys.exit("the working tree has changes: commit them first")
    if git("tag", "--list", f"v{new}"):
        sys.exit(f"v{new} is tagged already")
    try:
        texts = rewritten(ROOT, new, datetime.now(UTC).date())
    except ValueError as error:
        sys.exit(str(error))
    for path, text in texts.items():
        path.write_text(text, "utf-8")
    git("commit", "--all", "--message", f"Release {new}")
    git("tag", "--annotate", f"v{new}", "--message", f"Precedent {new}")
    print(f"{len(texts)} files name {new}, committed and tagged; to publish: git push origin HEAD v{new}")


if __name__ == "__main__":
    main()
