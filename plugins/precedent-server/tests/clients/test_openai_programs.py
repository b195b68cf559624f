"""Programs that are told OpenAI's base URL, a key and a model: `llm`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.clients


def test_llm(server: Any, tmp_path: Path) -> None:
    """Answers whole and as a stream."""
    model = f"- model_id: mine\n  model_name: echo\n  api_base: {server.url}\n  api_key_name: mine\n"
    (tmp_path / "extra-openai-models.yaml").write_text(model, encoding="utf-8")
    for more in ([], ["--no-stream"]):
        command = [sys.executable, "-m", "llm", "-m", "mine", "--key", server.keys["desk"], *more, "Count to 9"]
        environment = {**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}  # ours has one
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.stdout.strip(), done.stderr) == ("1 2 3 4 5 6 7 8 9", "")
