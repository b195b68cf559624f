"""Run the LangChain tests on every mutant: `python tests/mutants/run.py [--only NAME] [--jobs N] [TESTS…]`.

Prints which test saw which mutant. Exit status 1 when one survived, raised by itself, or does not apply any more, and
when the tests fail without any.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from seen_in import SEEN_IN

HERE = Path(__file__).parent
ROOT = HERE.parent.parent
TESTS = "tests/langchain"
NONE = "(none)"
"""The run without a mutant, which has to pass: else every mutant would be caught."""

SEEN = ("FAILED ", "ERROR ")


def outcome(returncode: int, output: str) -> tuple[bool, str]:
    """Whether the tests saw a mutant, and which did; or what happened instead."""
    lines = output.splitlines()
    first = next((line for line in lines if line.startswith(SEEN)), "")
    if returncode == 1 and first:
        return True, first.split(" ", 1)[1].split(" - ")[0]
    if returncode == 0:
        return False, "SURVIVED"
    return False, f"BROKEN (exit status {returncode}): {' '.join(lines[-3:])}"


def verdict(name: str, returncode: int, output: str) -> tuple[bool, str]:
    """Whether all is as it should be with a mutant, or with the tests when there is none; and one line about it."""
    seen, words = outcome(returncode, output)
    if name == NONE:
        return returncode == 0, "the tests pass" if returncode == 0 else f"the tests fail without a mutant: {words}"
    return seen, words


def run(name: str, tests: Sequence[str]) -> tuple[bool, str]:
    """The tests on one mutant, until the first that fails."""
    path = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PRECEDENT_MUTANT": "" if name == NONE else name}
    soonest = [f"{TESTS}/test_{SEEN_IN[name]}.py"] if name in SEEN_IN else []
    plugins = ["-p", "mutant_plugin", "-p", "no:cacheprovider", "-n", "0"]
    command = [sys.executable, "-m", "pytest", *plugins, "-x", "-q", "--tb=no", *(tests or [*soonest, TESTS])]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return verdict(name, done.returncode, done.stdout + done.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all mutants, or those that were named."""
    from mutants import MUTANTS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tests", nargs="*", help=f"default: {TESTS}, the file that sees the mutant soonest first")
    parser.add_argument("--only", action="append", choices=list(MUTANTS), metavar="NAME")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    given = parser.parse_args(arguments)
    names = given.only or [NONE, *MUTANTS]
    wide, wrong = max(map(len, names)), 0
    with ThreadPoolExecutor(given.jobs) as pool:
        running = {pool.submit(run, name, given.tests): name for name in names}
        for done in as_completed(running):
            right, words = done.result()
            print(f"{running[done]:{wide}}  {words}", flush=True)
            wrong += not right
    print(f"\n{len(names) - wrong} of {len(names)} as they should be" + (f", {wrong} NOT" if wrong else ""))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
