"""The tables on what was trained: drafts of several kinds, and judges beside the other lossy modes."""

from __future__ import annotations

from figure_table import lines, named, rows
from figure_words import DRAFTS

GAIN = "{%s[%s][tokens_per_step]:.2f}, {%s[%s][speedup]:.2f}x"
SHIPPED = {
    "chain": "the shipped chain, hours",
    "block": "the shipped block, 1.5 hours",
    "exit": "exit behind layer 4, 5 minutes",
}
"""Drafts by the name under which a file has them, with the time that their training took."""


def gain(name: str, way: str) -> str:
    """Tokens per step, and the speed beside plain decoding's."""
    return GAIN % (name, way, name, way)


def beside(name: str, said: str) -> tuple[str, ...]:
    """A draft's row: its size, what its samples bring and cost, and its gain beside each cache and the cache's."""
    alone = (f"{{{name}[mebibytes]:.0f}} MiB", f"{{{name}[alone][accepted]}}", f"{{{name}[alone][of_a_step]}}")
    cached = (
        f"{gain(name, f'draft, {cache}')} ({{{name}[cache, {cache}][speedup]:.2f}}x)" for cache in ("foreign", "warm")
    )
    return (said, *alone, gain(name, "draft, empty"), *cached)


BARE = ("none", "", "", "", "1.00, 1.00x", gain("chain", "cache, foreign"), gain("chain", "cache, warm"))

TRAINED = {
    "drafts": named(
        "drafts",
        ("draft", "steps", "accepted, first to last", "a draw or forward, of a step", "per step, expected", "speed"),
        DRAFTS,
        "{%s[steps]:,}",
        "{%s[accepted]}",
        "{%s[of_a_step]}",
        "{%s[tokens_per_step]:.2f}",
        "{%s[speed]:.2f}x",
    ),
    "drafts-beside": lines(
        "drafts-beside",
        ("draft", "on disk", "accepted", "of a step", "no cache", "a foreign one (it alone)", "a warm one (it alone)"),
        [BARE, *(beside(name, said) for name, said in SHIPPED.items())],
    ),
    "lossy": rows(
        "lossy",
        {
            "temperature": "{temperature:g}",
            "mode": "{said}",
            "tokens per step": "{tokens_per_step:.2f}",
            "solved (95 %)": "{solved} of {requests} ({interval[0]:.0%} to {interval[1]:.0%})",
            "lost, won against lossless": "{lost}, {won}",
            "total variation per token": "{spent_per_token:.3f}",
        },
        each="conversations",
    ),
    "lossy-front": rows(
        "lossy",
        {
            "mode": "{said}",
            "rejections": "{draft[rejections]:.4f}",
            "total variation": "{draft[total_variation]:.4f}",
            "rejections beside the cache": "{draft and cache[rejections]:.4f}",
            "its total variation": "{draft and cache[total_variation]:.4f}",
        },
        each="rows",
    ),
}
