"""The findings of a check of a store."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that differs from what was written.

    `kind` is structure, record or vector; `detail` is a line for people; `ids` are the affected records.
    """

    kind: str
    detail: str
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """What `verify_cache` found in the file at `path`; `records` is the number of sound ones."""

    path: str
    records: int
    findings: tuple[Finding, ...]

    @property
    def sound(self) -> bool:
        """True if nothing is damaged."""
        return not self.findings
