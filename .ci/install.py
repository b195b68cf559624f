"""`pip install`, with a line now and then that says how far it is: minutes of silence look like a command that hangs.

    python .ci/install.py "installing the test tools" ARGUMENTS-OF-PIP-INSTALL…

Runs before anything is installed, so that it needs no more than Python. What pip printed is shown where pip fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "src"))

from precedent.cli.progress import Progress

PIP = (sys.executable, "-m", "pip", "install", "--progress-bar", "off", "--disable-pip-version-check")
# a module is compiled where it is first imported: most of what torch and transformers bring never is
PIP += ("--no-compile",)

STAGES = {
    r"Collecting (?P<what>[^ ;<>=!~\[]+)": "looking for {what}",
    r"Downloading (?P<what>[^ /]+?)-\d.* (?P<size>\([\d.]+ .?B\))": "downloading {what} {size}",
    r"Building wheel for (?P<what>\S+)": "building {what}",
    r"Installing collected packages: (?P<what>.+)": "writing {number} packages",
}
"""Lines of pip that begin a stage, and what is said of it."""


def stage(line: str) -> str | None:
    """What pip does from this line on; None where the line says nothing new."""
    for pattern, said in STAGES.items():
        found = re.match(pattern, line.strip())
        if found:
            return said.format(number=found["what"].count(",") + 1, **found.groupdict())
    return None


def follow(lines: Iterable[str], progress: Progress) -> list[str]:
    """Show the stages as they come; returns all lines."""
    seen = []
    for line in lines:
        seen.append(line)
        note = stage(line)
        if note is not None:
            progress.show("pip", note=note)
    return seen


def main(what: str, *arguments: str) -> int:
    """Install; returns pip's own status."""
    print(f"== {what}", flush=True)
    with Progress(terminal=False) as progress:
        progress.show("pip")
        with subprocess.Popen([*PIP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as pip:
            assert pip.stdout is not None
            seen = follow(pip.stdout, progress)
    if pip.returncode:
        print("".join(seen), file=sys.stderr)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
