"""The tables on what was trained: drafts of several kinds, and judges beside the other lossy modes."""

from __future__ import annotations

from figure_table import rows

TRAINED = {
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
