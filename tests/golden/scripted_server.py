"""`precedent serve` on a model that follows a script: `python scripted_server.py FOLDER`, ended by SIGTERM.

The folder holds the model that is named, whose weights are not read. Standard error goes to standard output, where the
server tells its address.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from precedent import Engine
from precedent.cli.app import main
from precedent_testing.scripted_model import scripted_model_engine

CALL = '<tool_call>\n{"name": "look_up", "arguments": {"number": "1042"}}\n</tool_call>'


def answer(prompt: str) -> str:
    """Call a tool if there is one and no result yet, fill in a schema, or tell what happened to the order."""
    if "<tool_response>" not in prompt and '"name": "look_up"' in prompt:
        return f"I look.\n{CALL}"
    if "as JSON" in prompt:
        return '{"number": "1042", "sent": true}'
    return "Order 1042 was sent to Zoë. The refund is on its way."


def load(*source: Any, name: str = "scripted", **options: Any) -> Engine:
    """Replace the loading of weights."""
    return scripted_model_engine(answer, name=name)


if __name__ == "__main__":
    os.dup2(1, 2)
    Engine.load = load  # type: ignore[method-assign,assignment]
    main(arguments=["serve", "--model", f"scripted={sys.argv[1]}", "--port", "0"])
