"""Claude Code, which speaks only Anthropic's interface: it reads a file as the model asks, and sends it back."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.clients

CLAUDE = Path(__file__).parent / "node_modules/.bin/claude"
SETTINGS = (
    *("--bare", "--model", "echo", "--tools", "Read", "--system-prompt", "Be brief."),
    *("--no-session-persistence", "--output-format", "json"),
)


def test_a_tool_loop(server: Any, tmp_path: Path) -> None:
    order = tmp_path / "order.txt"
    order.write_text("order 1042 was sent on Monday", encoding="utf-8")
    call = json.dumps({"name": "Read", "arguments": {"file_path": str(order)}})
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("ANTHROPIC_", "CLAUDE"))},
        **{"ANTHROPIC_BASE_URL": server.address, "ANTHROPIC_API_KEY": server.keys["desk"], "HOME": str(tmp_path)},
        **{"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4000"},
    }
    asked = [CLAUDE, "-p", f"<tool_call>\n{call}\n</tool_call>", *SETTINGS]
    done = subprocess.run(
        asked, cwd=tmp_path, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    told = json.loads(done.stdout)
    assert (done.returncode, told["is_error"], told["num_turns"]) == (0, False, 2), done.stdout + done.stderr
    assert "order 1042 was sent on Monday" in told["result"]
