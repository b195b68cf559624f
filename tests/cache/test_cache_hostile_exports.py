"""An archive that was made to break an import ends it with one clear error, soon and without much memory."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from precedent.cache import Completion, SpeculationCache
from precedent.cache.exports import checksum_of
from precedent.errors import CacheError
from precedent_testing.embedders import HashEmbedder

from helpers.cache_commands import run  # isort: skip

DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    with SpeculationCache.open(tmp_path / "cache", embedder=HashEmbedder()) as cache:
        for number in range(3):
            cache.insert(Completion((number, 7), "tok", "model", query=f"query {number}", text="text"))
    assert run("export", tmp_path / "cache", tmp_path / "archive").exit_code == 0
    return tmp_path / "archive"


def sealed(archive: Path, change: Callable[[dict[str, Any]], object] = lambda manifest: None) -> None:
    """Change the manifest, and give it and all parts the checksums that they then have."""
    manifest = json.loads((archive / "export.json").read_text())
    for part in manifest["parts"]:
        for kind in part["sha256"]:
            file = archive / f"{part['name']}.{kind}"
            if file.is_file() and file.stat().st_size < 10**8:
                part["sha256"][kind] = hashlib.sha256(file.read_bytes()).hexdigest()
    change(manifest)
    manifest["sha256"] = checksum_of(manifest)
    (archive / "export.json").write_text(json.dumps(manifest))


def refused(archive: Path) -> str:
    """The one line with which the command ends."""
    result = run("import", archive.with_name("other"), archive)
    assert result.exit_code == 2, result
    assert result.stderr.count("\n") == 1, result.stderr
    assert len(result.stderr) < 1000
    return result.stderr


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("token_ids", np.zeros((3, 2), dtype="<i4")),
        ("token_ids", np.zeros(6, dtype="<i8")),
        ("token_ids", np.zeros(6, dtype="<f4")),
        ("token_ids", np.zeros((), dtype="<i4")),
        ("lengths", np.array([[2, 2, 2]], dtype="<i8")),
        ("lengths", np.array([2, -2, 6], dtype="<i8")),
        ("lengths", np.array([2**62, 2**62, 2**63 - 1], dtype="<i8")),
        ("places", np.array([0, 1, 9], dtype="<i8")),
        ("places", np.array([0, 1, -9], dtype="<i8")),
        ("places", np.array([0.0, 1.0, 2.0], dtype="<f8")),
        ("vectors", np.zeros((3, 2, 2), dtype="<f4")),
        ("vectors", np.full((3, 384), np.nan, dtype="<f4")),
        ("vectors", None),
        ("lengths", None),
        ("token_ids", None),
    ],
)
def test_arrays_of_another_shape_or_type_are_refused(archive: Path, name: str, array: Any) -> None:
    file = archive / "part-00001.safetensors"
    tensors = {**load(file.read_bytes()), name: array}
    file.write_bytes(save({key: value for key, value in tensors.items() if value is not None}))
    sealed(archive)
    assert "part-00001 does not hold what an export holds" in refused(archive)


@pytest.mark.parametrize("line", [DEEP, "[]", "7", "null", '"text"', '{"query": ' + DEEP + "}", '{"query": 1e999}'])
def test_lines_that_are_no_records_are_refused(archive: Path, line: str) -> None:
    file = archive / "part-00001.jsonl"
    file.write_text("\n".join([line, *file.read_text().splitlines()[1:]]) + "\n")
    sealed(archive)
    assert "part-00001 does not hold what an export holds" in refused(archive)


@pytest.mark.parametrize("text", [DEEP, "[]", "null", "7", '{"format": ' + DEEP + "}"])
def test_a_manifest_of_another_kind_is_refused(archive: Path, text: str) -> None:
    (archive / "export.json").write_text(text)
    assert "export.json is not the manifest of an export" in refused(archive)


@pytest.mark.parametrize("name", ["a\x00b", "../part-00001", "/etc/passwd", "part-00001/..", "", "x" * 5000, 7, None])
def test_a_part_of_another_name_is_refused(archive: Path, name: Any) -> None:
    sealed(archive, lambda manifest: manifest["parts"][0].update(name=name))
    assert "export.json is not the manifest of an export" in refused(archive)


@pytest.mark.parametrize(
    "embedder", [{}, [], "x", {"name": 1, "fingerprint": "x", "dimension": -4}, {"deep": [[[[]]]]}]
)
def test_an_embedder_of_another_kind_is_refused(archive: Path, embedder: Any) -> None:
    sealed(archive, lambda manifest: manifest.update(embedder=embedder))
    assert "record of the embedder is damaged" in refused(archive)


@pytest.mark.skipif(os.name != "posix", reason="sparse files, pipes and links")
@pytest.mark.parametrize("name", ["export.json", "part-00001.jsonl", "part-00001.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "link", "folder", "sparse"])
def test_what_is_no_plain_file_of_bounded_size_is_not_read(archive: Path, name: str, kind: str) -> None:
    """Thirty gigabytes of nothing take no room on the disk, and a pipe that nobody writes to never ends."""
    file = archive / name
    file.rename(archive / "was")
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to("/dev/zero")
    elif kind == "folder":
        file.mkdir()
    else:
        with file.open("wb") as opened:
            opened.truncate(30 * 10**9)
    assert name.split(".", maxsplit=1)[0] in refused(archive)


def test_the_archive_itself_is_sound(archive: Path) -> None:
    sealed(archive)
    assert run("import", archive.with_name("other"), archive).exit_code == 0
    with pytest.raises(CacheError, match="there is no cache"), SpeculationCache.open(archive, read_only=True):
        pass
