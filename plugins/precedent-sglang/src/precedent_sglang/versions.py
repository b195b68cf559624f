"""Which SGLang this package knows."""

from __future__ import annotations

from precedent.errors import UnsupportedError

READ = ("0.5.23",)
"""Versions whose source was read. None ran here."""


def check_version(version: str) -> None:
    """Raise UnsupportedError for a version whose interface is not known; a build's own suffix (`+cu130`) is ignored."""
    if version.partition("+")[0] not in READ:
        raise UnsupportedError(
            f"precedent-sglang knows SGLang {', '.join(READ)}, and this is {version or 'of no version'}: "
            "install that one, or a newer precedent-sglang"
        )
