"""`precedent` as a shell runs it, in this process."""

from __future__ import annotations

import pytest

from precedent.cli.app import main


def precedent(*arguments: object) -> int:
    """Run the command line with these arguments; returns its exit status."""
    with pytest.raises(SystemExit) as ended:
        main([str(one) for one in arguments])
    return int(ended.value.code or 0)
