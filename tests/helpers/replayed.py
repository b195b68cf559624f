"""Logs as files, and what a replay of them finds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from precedent_replay.run import Settings, replay
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer


def written(path: Path, records: Sequence[dict[str, object]]) -> Path:
    """A log file."""
    path.write_text("".join(json.dumps(each) + "\n" for each in records))
    return path


def rows(log: Path, **settings: Any) -> dict[str, dict[str, Any]]:
    """The rows of a replay by name."""
    found = replay([log], [], byte_tokenizer(), HashEmbedder(), Settings(**settings)).as_dict()
    return {row["name"]: row for row in found["drafters"]}
