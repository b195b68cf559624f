"""A repair never loses the only copy of anything: cut short, without room, or beside another process."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from helpers.cache_files import PAGE, changed
from helpers.repairs import COUNT, filled, kept, logged, names_in, repaired

from precedent.cache import SQLiteStore, verify_cache
from precedent.cache.maintain import salvage as salvaging
from precedent.errors import CacheError


def test_every_repair_keeps_its_own_damaged_file(tmp_path):
    file, before = filled(tmp_path), []
    for _ in range(3):
        changed(file, "CREATE TABLE planted (x)")
        before.append(file.read_bytes())
        assert repaired(file) == list(range(COUNT))
    assert [kept(file, number).read_bytes() for number in (1, 2, 3)] == before


@pytest.mark.parametrize("killed_at", range(1, 9))
def test_a_repair_that_is_cut_short_is_finished_by_the_next(tmp_path, monkeypatch, killed_at):
    """Before each step that changes a name in turn; until it is finished nobody opens the cache."""
    main, log = logged(tmp_path / "a")
    file = tmp_path / "b" / "precedent.sqlite"
    file.parent.mkdir()
    file.write_bytes(main[:PAGE])
    Path(f"{file}-wal").write_bytes(log)
    steps = []

    class Killed(BaseException):
        pass

    def step(done):
        def stepped(*arguments, **options):
            steps.append(arguments)
            if len(steps) == killed_at:
                raise Killed
            return done(*arguments, **options)

        return stepped

    with monkeypatch.context() as patched:
        patched.setattr("os.link", step(os.link))
        patched.setattr(Path, "replace", step(Path.replace))
        patched.setattr("os.fsync", step(os.fsync))
        try:
            verify_cache(file, repair=True)
        except Killed:
            assert not any(path.name.startswith(".") for path in file.parent.iterdir())
        else:
            assert len(steps) < killed_at, "all steps were tried"
    if Path(f"{file}.repaired").exists():
        with pytest.raises(CacheError, match="its repair was interrupted; repair it again to finish that"):
            SQLiteStore.open(file)
    assert set(range(100, 100 + COUNT)) <= set(repaired(file))
    assert kept(file).read_bytes() == main[:PAGE]
    assert Path(f"{kept(file)}-wal").read_bytes() == log
    assert not kept(file, 2).exists()


def test_a_repair_without_room_changes_nothing(tmp_path, monkeypatch):
    """The disk is full, again and again at another place of the new file."""
    file = filled(tmp_path)
    changed(file, "CREATE TABLE planted (x)")
    before = file.read_bytes()
    code = """
        import resource, sys
        from precedent.cache import verify_cache
        from precedent.errors import CacheError
        resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
        try:
            verify_cache(sys.argv[1], repair=True)
        except CacheError as error:
            print(error)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    for room in (0, 3 * PAGE, len(before) // 2):
        command = [sys.executable, "-c", textwrap.dedent(code), str(file), str(room)]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        assert "cannot be repaired now: disk I/O error; free some disk space" in said
        assert file.read_bytes() == before
        assert names_in(tmp_path) == {"precedent.sqlite"}
    assert repaired(file) == list(range(COUNT))


def test_a_file_that_is_open_is_not_replaced(tmp_path, nobody_waits_long):
    """In this process, whether reading or writing; it can be repaired once it is closed."""
    file = filled(tmp_path)
    for read_only in (False, True):
        store = SQLiteStore.open(file, read_only=read_only)
        changed(file, "CREATE TABLE planted (x)")
        with pytest.raises(CacheError, match="in use in this process; close the cache"):
            verify_cache(file, repair=True)
        store.close()
        assert repaired(file) == list(range(COUNT))


def test_a_file_that_another_process_has_open_is_not_replaced(tmp_path, nobody_waits_long):
    file = filled(tmp_path)
    code = """
        import sys
        from precedent.cache import SQLiteStore
        store = SQLiteStore.open(sys.argv[1])
        print("open", flush=True)
        sys.stdin.read()
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-c", textwrap.dedent(code), str(file)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "open\n"
        changed(file, "CREATE TABLE planted (x)")
        before = file.read_bytes()
        with pytest.raises(CacheError, match="in use by another process"):
            verify_cache(file, repair=True)
        assert file.read_bytes() == before
        other.communicate("")
    assert repaired(file) == list(range(COUNT))


def test_nobody_here_opens_a_file_while_it_is_repaired(tmp_path, monkeypatch):
    file = filled(tmp_path)
    changed(file, "UPDATE meta SET value = 'x' WHERE key = 'epoch'")
    write, refused = salvaging.write_database, []

    def meanwhile(path, fill):
        changed(file, "UPDATE meta SET value = 1 WHERE key = 'epoch'")  # opening would find nothing wrong
        with pytest.raises(CacheError, match="is being repaired") as caught:
            SQLiteStore.open(file)
        refused.append(caught.value)
        write(path, fill)

    monkeypatch.setattr(salvaging, "write_database", meanwhile)
    assert verify_cache(file, repair=True).sound
    assert len(refused) == 1


def test_a_file_system_without_hard_links_keeps_a_copy(tmp_path, monkeypatch):
    file = filled(tmp_path)
    changed(file, "CREATE TABLE planted (x)")
    before = file.read_bytes()

    def none(*_):
        raise OSError("no links here")

    monkeypatch.setattr("os.link", none)
    assert repaired(file) == list(range(COUNT))
    assert kept(file).read_bytes() == before


def test_who_may_read_the_file_stays(tmp_path):
    file = filled(tmp_path)
    file.chmod(0o640)
    changed(file, "CREATE TABLE planted (x)")
    repaired(file)
    assert file.stat().st_mode & 0o777 == kept(file).stat().st_mode & 0o777 == 0o640
