"""What only Linux has is not needed, as far as Linux can show it: `helpers.other_systems` says what is taken away."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.other_systems import run_as_on

PROGRAM = """
import sys
from helpers.other_systems import import_as_on

assert import_as_on(sys.argv[1], "precedent") > 150

from precedent import ChatPrecedent, SpeculationCache
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine

for accepted in (False, True):
    with SpeculationCache.open("cache", embedder=HashEmbedder()) as cache:
        model = ChatPrecedent.from_engine(scripted_model_engine(["It is on its way."], cache=cache))
        answer = model.invoke("Where is order 1042?")
        model.engine.close()
    assert answer.text == "It is on its way."
    by_source = answer.response_metadata["speculation"]["accepted_by_source"]
    assert ("recall" in by_source) is accepted, by_source
assert "faiss" not in sys.modules
print("answered")
"""


@pytest.mark.parametrize("system", ["win32", pytest.param("darwin", marks=pytest.mark.slow)])
def test_every_module_is_imported_and_a_request_answered_without_what_only_linux_has(
    system: str, tmp_path: Path
) -> None:
    done = run_as_on(system, PROGRAM, tmp_path)
    assert done.stdout == "answered\n", done.stderr[-3000:]
