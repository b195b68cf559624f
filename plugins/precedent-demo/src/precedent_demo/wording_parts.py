"""The parts of a set of sentences; see wording."""

from __future__ import annotations

from dataclasses import dataclass

Sentences = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Wording:
    """One set of sentences for the openings, replies and remarks of customers."""

    greetings: Sentences
    order_by_number: Sentences
    order_by_product: Sentences
    item_by_number: Sentences
    item_by_product: Sentences
    concerns: dict[str, Sentences]
    reasons: dict[str, Sentences]
    emails: Sentences
    numbers: Sentences
    corrections: Sentences
    agreements: Sentences
    refusals: Sentences
    questions: dict[str, Sentences]
    second_concerns: dict[str, Sentences]
