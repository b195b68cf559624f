"""`precedent cache warm`: recorded answers become completions, as `ChatPrecedent` itself would have stored them."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path

import pytest
from langchain_core.load import dumps
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, Generation

from precedent.cache import Selection, SQLiteStore
from precedent.cache.filling import Vectors, fill
from precedent.errors import PromptError
from precedent.langchain.recorded import AnswerReader, is_answer_cache, read_answer_cache
from precedent.text.traces import read_trajectories
from precedent_testing.embedders import HashEmbedder
from precedent_testing.tiny_models import byte_tokenizer

ALL = Selection()
TOOL = {
    "type": "function",
    "function": {"name": "look_up", "description": "Look an order up.", "parameters": {"type": "object"}},
}
CALL = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"order": 17}'}}
CHAT = {
    "messages": [
        {"role": "system", "content": "You help."},
        {"role": "user", "content": "Where is order 17?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "on its way", "tool_call_id": "c1"},
        {"role": "assistant", "content": "It is on its way."},
    ],
    "tools": [TOOL],
}


def log(folder: Path, *records: object, name: str = "log.jsonl") -> Path:
    path = folder / name
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


def warmed(store, *paths: Path, reader: AnswerReader | None = None):
    reader = reader or AnswerReader(byte_tokenizer())
    return fill_from(store, read_trajectories(paths, reader.skipped.add), reader), reader


def fill_from(store, calls, reader: AnswerReader):
    return fill(store, (one for call in calls for one in reader.completions(call)), Vectors(store, HashEmbedder()))


def texts(store) -> list[str]:
    return [one.text for one in reversed(store.list(ALL, None))]


def test_what_is_skipped_is_counted_by_its_reason(tmp_path):
    image = {"type": "image_url", "image_url": {"url": "data:…"}}
    bad = [
        "not json",
        {"something": "else"},
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]},
        {"messages": [{"role": "user", "content": [image]}, {"role": "assistant", "content": "a cat"}]},
        {"messages": [{"role": "wizard", "content": "hi"}, {"role": "assistant", "content": "hello"}]},
        {"messages": ["no message", 5, {"role": "assistant", "content": "hello"}]},
        {"inputs": {"messages": []}, "outputs": {}},
    ]
    store = SQLiteStore.open()
    path = log(tmp_path, *bad, CHAT)
    with path.open("a", encoding="utf-8") as file:
        file.write('{"messages": [torn')
    filled, reader = warmed(store, path)
    skipped = reader.skipped.as_list()
    assert filled.stored == 2
    assert sum(one["count"] for one in skipped) == len(bad) + 1
    reasons = " | ".join(one["reason"] for one in skipped)
    expected = (
        "is not JSON",
        "is not a chat trace",
        "without text or tool calls",
        "'image_url'",
        "torn",
        "LangSmith run",
    )
    assert [words for words in expected if words not in reasons] == []
    assert any(f"{path} line 1 is not JSON" in one["first"] for one in skipped)


# LangChain's answer caches


def answer_cache(folder: Path) -> Path:
    """What `SQLiteCache` of langchain-community writes, with an entry of a model that is no chat model."""
    path = folder / ".langchain.db"
    chat = [SystemMessage("You help."), HumanMessage("Where is order 17?")]
    call = AIMessage("", tool_calls=[{"name": "look_up", "args": {"order": 17}, "id": "c1"}])
    said = [*chat, call, ToolMessage("gone", tool_call_id="c1")]
    rows = [
        (dumps(chat), "llm", 0, dumps(ChatGeneration(message=call))),
        (dumps(said), "llm", 0, dumps(ChatGeneration(message=AIMessage("Gone.")))),
        ("Once upon a time", "llm", 0, dumps(Generation(text="there was"))),
    ]
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        columns = "prompt TEXT, llm TEXT, idx INTEGER, response TEXT, PRIMARY KEY (prompt, llm, idx)"
        connection.execute(f"CREATE TABLE full_llm_cache ({columns})")
        connection.executemany("INSERT INTO full_llm_cache VALUES (?, ?, ?, ?)", rows)
    return path


def from_cache(source, store):
    reader = AnswerReader(byte_tokenizer())
    return fill_from(store, read_answer_cache(source, reader.skipped.add), reader), reader


def test_a_sqlite_answer_cache_is_read_and_left_as_it_was(tmp_path):
    path, store = answer_cache(tmp_path), SQLiteStore.open()
    before = path.read_bytes()
    assert is_answer_cache(path)
    filled, reader = from_cache(path, store)
    assert filled.stored == 2
    assert texts(store) == ['<tool_call>\n{"name": "look_up", "arguments": {"order": 17}}\n</tool_call>', "Gone."]
    (skipped,) = reader.skipped.as_list()
    assert (skipped["count"], skipped["reason"]) == (1, "is not a chat model's answer")
    assert path.read_bytes() == before
    assert {file.name for file in tmp_path.iterdir()} == {path.name}


def test_a_foreign_database_is_refused_by_name(tmp_path):
    with contextlib.closing(sqlite3.connect(tmp_path / "x.db")) as connection, connection:
        connection.execute("CREATE TABLE other (x)")
    with pytest.raises(PromptError, match="no table full_llm_cache"):
        from_cache(tmp_path / "x.db", SQLiteStore.open())
