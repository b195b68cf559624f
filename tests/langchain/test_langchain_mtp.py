"""Chat models that name `mtp`: their engine keeps hidden states from the start; others' engines do not."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.mtp_checkpoints import checkpoint

from precedent import ChatPrecedent
from precedent.errors import ConfigError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("mtp") / "qwen", "qwen3_5_text")


def test_a_model_that_names_mtp_drafts_with_it(folder: Path) -> None:
    """The answer is that of plain decoding, and the head proposed."""
    llm = ChatPrecedent(model=str(folder), dtype="float64", drafters=["prompt", "mtp"], max_tokens=12, temperature=0)
    drafted, plain = llm.invoke("hello"), llm.invoke("hello", speculation=False)
    llm.engine.close()
    assert drafted.content == plain.content
    assert drafted.response_metadata["speculation"]["drafted_by_source"]["mtp"] > 0


def test_a_call_alone_cannot_name_it(folder: Path) -> None:
    """The engine of a model that does not is built without a head."""
    llm = ChatPrecedent(model=str(folder), dtype="float64", max_tokens=12, temperature=0)
    with pytest.raises(ConfigError, match="name mtp among the drafters of its own speculation settings"):
        llm.invoke("hello", drafters=["mtp"])
    assert llm.engine.target.runner.hidden is None
    llm.engine.close()
