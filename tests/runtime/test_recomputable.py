"""Files that can be computed again are discarded if they are not sound, and the next process answers as before."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from precedent.runtime.recomputable import computed_folder, sealed, unsealed

PROGRAM = Path(__file__).with_name("compiling_program.py")
RIGHT = "[70.0, 70.0, 42]"


def flipped(place: float) -> Callable[[bytes], bytes]:
    def flip(content: bytes) -> bytes:
        at = int(place * (len(content) - 1))
        return content[:at] + bytes([content[at] ^ 4]) + content[at + 1 :]

    return flip


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "a byte": lambda content: content[:1],
    "half": lambda content: content[: len(content) // 2],
    "all but a byte": lambda content: content[:-1],
    "longer": lambda content: content + b"\0",
    "zeros": lambda content: bytes(len(content)),
    "zeros at the end": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    **{f"a bit at {place}": flipped(place) for place in (0.0, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 1.0)},
}


def test_content_is_read_only_as_it_was_written() -> None:
    content = sealed(b"payload\n\x00", "version 1")
    assert unsealed(content, "version 1") == b"payload\n\x00"
    with pytest.raises(ValueError, match="another version"):
        unsealed(content, "version 2")
    for name, damage in DAMAGE.items():
        with pytest.raises(ValueError, match="damaged"):
            assert unsealed(damage(content), "version 1") is None, name


# Compiled kernels


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def next_process(kernels: Path) -> Iterator[Callable[[], str]]:
    """Runs compiled code in another process; returns its log and its answer."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(kernels), "NUMBA_OPT": "0"}
    command = [sys.executable, str(PROGRAM)]
    with subprocess.Popen(
        command, env=environment, text=True, bufsize=1, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as program:
        assert program.stdin
        assert program.stdout

        def run() -> str:
            program.stdin.write("go on\n")
            lines = list[str]()
            while not lines or not lines[-1].startswith("ended"):
                lines.append(program.stdout.readline())
                assert lines[-1], "the program has ended"
            assert lines[-1] == "ended 0\n", lines
            return "".join(lines)

        yield run


def files(folder: Path, ending: str = "") -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in sorted(folder.rglob(f"*{ending}")) if file.is_file()}


def test_compiled_kernels_are_kept(kernels: Path, next_process: Callable[[], str]) -> None:
    assert RIGHT in (said := next_process())
    assert said.count("compiling kernels for this processor") == 1
    kept = {file: file.stat().st_mtime_ns for file in files(kernels)}
    assert {file.suffix for file in kept} == {".nbi", ".nbc"}
    assert RIGHT in (said := next_process())
    assert "again" not in said
    assert "compiling" not in said
    assert {file: file.stat().st_mtime_ns for file in files(kernels)} == kept, "nothing was compiled anew"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("ending", "name"),
    [
        *[("nbi", name) for name in ("empty", "half", "zeros", "a bit at 0.5")],
        *[("nbc", name) for name in ("empty", "half", "all but a byte", "zeros", "a bit at 0.0", "a bit at 0.5")],
    ],
)
def test_damaged_kernels_are_compiled_again(
    kernels: Path, next_process: Callable[[], str], name: str, ending: str
) -> None:
    next_process()
    for file, content in files(kernels, ending).items():
        file.write_bytes(DAMAGE[name](content))
    said = next_process()
    assert RIGHT in said
    assert said.count(" again: ") == 2, said
    damaged = files(kernels)
    assert RIGHT in (said := next_process())
    assert "compiling" not in said
    assert files(kernels) == damaged, "what was compiled again is kept"


def test_kernels_are_compiled_again_when_a_function_that_they_call_has_changed(tmp_path: Path) -> None:
    package = tmp_path / "loops"
    package.mkdir()
    compiled, called = "from precedent.runtime.compiled import compiled\n", "@compiled\ndef called(x): return x + 1\n"
    (package / "__init__.py").write_text("")
    (package / "calling.py").write_text(
        f"{compiled}from loops.called import called\n@compiled\ndef calling(x): return called(x)\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kept"), "NUMBA_OPT": "0"}
    script = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from loops.calling import calling; print(calling(1))"
    for text, expected in ((called, "2"), (called.replace("1", "12"), "13")):  # of another length: bytecode goes by it
        (package / "called.py").write_text(compiled + text)
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == expected


# Folders


def test_a_folder_is_computed_once_and_again_for_another_version(tmp_path: Path) -> None:
    computed = list[str]()

    def compute(into: Path) -> None:
        into.mkdir()
        (into / "content").write_text(str(computed.append("once")))

    for version in ("1", "1", "2", "2", "1"):
        computed_folder(tmp_path / "folder", version, compute)
    assert len(computed) == 3


def test_a_folder_that_was_not_finished_is_not_used(tmp_path: Path) -> None:
    """A process that ends while it computes leaves nothing in the folder's place, and is followed by another one."""

    def dies(into: Path) -> None:
        into.mkdir()
        (into / "content").write_text("half")
        os._exit(0)

    def compute(into: Path) -> None:
        into.mkdir()
        (into / "content").write_text("whole")

    if (child := os.fork()) == 0:
        computed_folder(tmp_path / "folder", "1", dies)
    os.waitpid(child, 0)
    assert not (tmp_path / "folder").exists()
    assert (computed_folder(tmp_path / "folder", "1", compute) / "content").read_text() == "whole"
    assert not list(tmp_path.glob("*.partial"))


def test_kernels_of_another_function_or_version_are_not_run(kernels: Path, next_process: Callable[[], str]) -> None:
    next_process()
    codes = files(kernels, "nbc")
    for file, content in zip(codes, [*list(codes.values())[1:], next(iter(codes.values()))], strict=True):
        file.write_bytes(content)
    assert RIGHT in (said := next_process())
    assert "another version" in said


def test_kernels_whose_folder_cannot_be_written_are_compiled(kernels: Path, next_process: Callable[[], str]) -> None:
    next_process()
    for file in files(kernels):
        file.unlink()
        file.mkdir()
    assert RIGHT in (said := next_process())
    assert "is not kept" in said
    for folder in [each for each in kernels.rglob("*.nb?") if each.is_dir()]:
        folder.rmdir()
