"""The tables on what was trained: drafts of several kinds, and judges beside the other lossy modes."""

from __future__ import annotations

from figure_table import named, rows
from figure_words import DRAFTS

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
