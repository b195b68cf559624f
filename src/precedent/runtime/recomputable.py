"""Files that Precedent can compute again: each carries a version and a checksum, and an unsound one is discarded.

They are a converted model's folder, compiled kernels and remembered step costs, never the speculation cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock

MANIFEST = "checksums.json"
"""The file in a folder that lists all others with their checksums."""

log = logging.getLogger(__name__)


def sealed(payload: bytes, version: str) -> bytes:
    """A file's content: one line with a checksum of version and payload, and the payload."""
    return _checksum(payload, version) + b"\n" + payload


def unsealed(content: bytes, version: str) -> bytes:
    """The payload of a file's content. Raises ValueError unless all of it is as `sealed` wrote it for this version."""
    checksum, _, payload = content.partition(b"\n")
    if checksum != _checksum(payload, version):
        raise ValueError("it is damaged, or from another version")
    return payload


def _checksum(payload: bytes, version: str) -> bytes:
    key = hashlib.sha256(version.encode()).digest()
    return hashlib.blake2b(payload, digest_size=16, key=key).hexdigest().encode()


def computed_folder(folder: Path, version: str, compute: Callable[[Path], None]) -> Path:
    """`folder`, if it is sound; otherwise `compute` makes another one, which takes its place.

    Other processes wait until it is complete. A process that is killed leaves nothing that would be used. Raises
    OSError, and whatever `compute` raises.
    """
    if _fault(folder, version):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if fault := _fault(folder, version):  # no other process has computed it meanwhile
                if folder.exists():
                    log.warning("computing %s again, because it cannot be used: %s", folder, fault)
                _compute(folder, version, compute)
    return folder


def _compute(folder: Path, version: str, compute: Callable[[Path], None]) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    _remove(partial)  # leftovers of a killed process; the lock is ours
    try:
        compute(partial)
        written = [file for file in sorted(partial.rglob("*")) if file.is_file()]
        files = {str(file.relative_to(partial)): _described(file) for file in written}
        (partial / MANIFEST).write_text(json.dumps({"version": version, "files": files}, indent=2), encoding="utf-8")
    except BaseException:
        _remove(partial)  # free the space on a disk that was too small
        raise
    _remove(folder)
    partial.replace(folder)  # complete or absent


def _fault(folder: Path, version: str) -> str:
    """Why a folder cannot be used; empty if it is sound."""
    if not folder.is_dir():
        return "it is not a folder"
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        if manifest["version"] != version:
            return f"it is of version {manifest['version']}, not {version}"
        for name, expected in manifest["files"].items():
            if _described(folder / name) != expected:
                return f"{name} is damaged"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as problem:
        return f"{type(problem).__name__}: {problem}"
    return ""


def _described(file: Path) -> dict[str, Any]:
    with file.open("rb") as opened:
        return {"bytes": file.stat().st_size, "sha256": hashlib.file_digest(opened, "sha256").hexdigest()}


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
