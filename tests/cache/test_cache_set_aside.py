"""A cache file that cannot be read is set aside with its log, said in one warning, and the cache starts empty."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from contextlib import closing
from pathlib import Path

import pytest
from helpers.cache_files import PAGE, changed, contents, fill, filled, logged, tokens_in, write

from precedent.cache import SpeculationCache, SQLiteStore
from precedent.errors import CacheError
from precedent_testing.embedders import HashEmbedder
from precedent_testing.store_contract import completion


def broken(file: Path) -> Path:
    """One page in the middle is overwritten."""
    content = bytearray(file.read_bytes())
    content[2 * PAGE : 3 * PAGE] = b"\xff" * PAGE
    file.write_bytes(content)
    return file


def kept(file: Path, number: int = 1) -> Path:
    return file.with_name(f"{file.name}.damaged" + ("" if number == 1 else f"-{number}"))


def test_one_warning_names_the_file_the_reason_and_what_recovers_it(tmp_path, caplog):
    file = broken(filled(tmp_path))
    before = file.read_bytes()
    with SpeculationCache.open(tmp_path, embedder=HashEmbedder()) as cache:
        assert cache.stats().records == 0
        assert cache.insert(completion(1)) == 1
    (warning,) = [record.getMessage() for record in caplog.records]
    assert f"{file} cannot be read" in warning
    assert f"sqlite3 {kept(file)} .recover" in warning
    assert kept(file).read_bytes() == before
    caplog.clear()
    assert tokens_in(file) == [1]
    assert caplog.records == []


def test_the_log_goes_with_the_file(tmp_path):
    found = logged(tmp_path / "a")
    file = write(tmp_path / "b", {"": found[""][:PAGE], "-wal": found["-wal"][: 3 * PAGE]})
    before = contents(file)
    assert tokens_in(file) == []
    assert contents(kept(file)) == before
    assert not Path(f"{file}-wal").exists()


def test_every_file_that_was_set_aside_is_kept(tmp_path):
    file = broken(filled(tmp_path))
    first = file.read_bytes()
    assert tokens_in(file) == []
    fill(store := SQLiteStore.open(file), range(50, 80))
    store.close()
    second = broken(file).read_bytes()
    assert tokens_in(file) == []
    assert (kept(file).read_bytes(), kept(file, 2).read_bytes()) == (first, second)


def test_a_file_whose_header_is_gone_is_ours_by_the_name_that_precedent_gave_it(tmp_path):
    file = filled(tmp_path)
    file.write_bytes(b"\xff" * PAGE + file.read_bytes()[PAGE:])
    other = tmp_path / "mine.db"
    shutil.copy(file, other)
    before = other.read_bytes()
    assert tokens_in(file) == []
    with pytest.raises(CacheError, match="is not a cache"):
        SQLiteStore.open(other)
    assert other.read_bytes() == before


def test_a_read_only_cache_is_refused_and_left_as_it_is(tmp_path):
    file = broken(filled(tmp_path))
    before = contents(file)
    for options in ({"read_only": True}, {"create": False}):
        with pytest.raises(CacheError, match=r"is damaged .*sqlite3 .* \.recover"):
            SQLiteStore.open(file, **options)
    assert contents(file) == before
    assert not kept(file).exists()


def test_a_file_that_this_process_has_open_is_left_in_place(tmp_path):
    file = filled(tmp_path)
    with closing(SQLiteStore.open(file)):
        broken(file)
        with pytest.raises(CacheError, match="this process has it open"):
            SQLiteStore.open(file)
    assert not kept(file).exists()


def test_a_file_that_another_process_has_open_is_left_in_place(tmp_path, nobody_waits_long):
    """Its last user deletes the log by its name when it closes: that would be the new cache's log."""
    file = filled(tmp_path)
    code = """
        import sys
        from precedent.cache import Selection, SQLiteStore
        store = SQLiteStore.open(sys.argv[1])
        store.list(Selection(), None)
        print("ready", flush=True)
        sys.stdin.read()
        store.close()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(file)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "ready\n"
        changed(file, "DELETE FROM meta WHERE key = 'epoch'")
        with pytest.raises(CacheError, match="another process has it open"):
            SQLiteStore.open(file)
        assert not kept(file).exists()
        other.communicate("")
    assert tokens_in(file) == []
    assert kept(file).exists()


def test_processes_that_open_a_damaged_file_at_once_set_it_aside_once(tmp_path):
    """All of them then share the new file."""
    file = broken(filled(tmp_path))
    code = """
        import sys
        from precedent.cache import Completion, SQLiteStore
        from precedent.errors import CacheError
        sys.stdin.readline()
        for _ in range(50):
            try:
                store = SQLiteStore.open(sys.argv[1])
                break
            except CacheError as error:
                assert any(words in str(error) for words in ("open it again", "has it open", "no cache at")), error
        store.insert(Completion((int(sys.argv[2]),), "tok", "model"), None, None)
        store.close()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(code), str(file), str(number)],
            env=environment,
            stdin=subprocess.PIPE,
            text=True,
        )
        for number in range(3)
    ]
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert tokens_in(file) == [0, 1, 2]
    assert [path.name for path in tmp_path.iterdir() if ".damaged" in path.name] == [kept(file).name]
