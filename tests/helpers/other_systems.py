"""Makes a Linux process look like one on another system to our packages, but not to those of others.

What only the other system has cannot be tried this way.
"""

from __future__ import annotations

import mmap
import os
import pkgutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import threadpoolctl

MODULES = {"darwin": "", "win32": "fcntl grp pwd resource termios tty"}
MISSING = {
    "darwin": {os: "sched_getaffinity sched_setaffinity", mmap: "MADV_HUGEPAGE"},
    "win32": {
        os: "fork register_at_fork sched_getaffinity sched_setaffinity sysconf getloadavg getuid geteuid chown killpg "
        "O_NOFOLLOW",
        mmap: "MADV_HUGEPAGE MADV_DONTNEED MAP_PRIVATE MAP_ANONYMOUS",
        signal: "SIGHUP SIGKILL SIGUSR1 SIGUSR2 SIGALRM",
    },
}
"""Modules and names of modules that each system lacks."""


def run_as_on(system: str, program: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a program, which calls `import_as_on(sys.argv[1], ...)` first, in a process of its own."""
    command = [sys.executable, "-W", "ignore", "-c", program, system]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def import_as_on(system: str, *packages: str) -> int:
    """Import every module of our packages without what `system` lacks; returns their number.

    There is no way back: use a process of its own.
    """
    _import_all(packages)  # and with them all that is not ours
    for name in [name for name in sys.modules if name.startswith("precedent")]:
        del sys.modules[name]
    sys.modules.update(dict.fromkeys(MODULES[system].split()))  # type: ignore[arg-type]  # None: an ImportError
    for module, names in MISSING[system].items():
        for name in names.split():
            delattr(module, name)
    sys.platform = system
    threadpoolctl.threadpool_info = lambda: []
    opened = Path.open
    Path.open = lambda path, *given, **more: opened(_without_proc(path), *given, **more)  # type: ignore[method-assign]
    return _import_all(packages)


def _without_proc(path: Path) -> Path:
    return path.with_name("none") if path.is_relative_to("/proc") or path.is_relative_to("/sys") else path


def _import_all(packages: Sequence[str]) -> int:
    folders = [(name, import_module(name).__path__) for name in packages]
    names = [module.name for name, path in folders for module in pkgutil.walk_packages(path, f"{name}.")]
    return len([import_module(name) for name in names])
