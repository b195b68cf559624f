"""Processes that end, fork and are forked, each forked from one that has imported everything: imports take longest.

    python tests/processes/process_program.py [SCENARIO...]

Runs scenarios one after another, each in a process of its own that ends as any Python program does, and prints for each
a line of JSON: its name, its exit status (a process that hangs is ended by SIGALRM), and what it said. Run by
`test_processes.py`.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module

from scenarios import NEED_A_SERVER, SCENARIOS, begin, in_fork

for offering in ("ending_programs", "refusing_forks", "working_forks"):
    import_module(offering)  # each offers its scenarios


def main() -> None:
    """Run the scenarios that were named, or all."""
    begin()
    for name in sys.argv[1:] or SCENARIOS.keys() - NEED_A_SERVER:
        print(json.dumps({"name": name, **in_fork(SCENARIOS[name])}), flush=True)


if __name__ == "__main__":
    main()
