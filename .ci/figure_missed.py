"""The table of goals that were missed, each beside what its file says was reached."""

from __future__ import annotations

from figure_table import Line, Table

REACHED = (
    (
        "server",
        "first token of a server 1.5 ms later than in process",
        "{one stream[first_token_ms][more]:.1f} ms",
    ),
    (
        "replay",
        "1.40 times the best baseline, tool calls of the same airline task at 32 nodes",
        "{tau_airline-same-task[budgets][32][tool_calls][ratio]:.2f}",
    ),
    (
        "service",
        "16 rows drafted for other engines in 1 ms of processor time",
        "{rows[16][step_work_us]!k:.2g} ms",
    ),
    (
        "service",
        "a row drafted in 100 µs of processor time, alone in its batch",
        "{rows[1][row_work_us]:.0f} µs",
    ),
    (
        "ray",
        "a Ray replica: 1.05 times a server's time per token, first token 4 ms later",
        "{ingress[ms_per_token][ratio]:.2f} times, {ingress[first_token_ms][more]:.1f} ms "
        "({empty application[first_event_ms][more]:.1f} are Ray's own)",
    ),
    (
        "drafts-beside",
        "a block draft alone: 1.15 times the chain's speed against plain decoding",
        "{block[draft, empty][speedup]:.2f} against {chain[draft, empty][speedup]:.2f}",
    ),
    (
        "drafts-beside",
        "a block draft beside a warm cache: 1.03 times the cache alone",
        "{block[draft, warm][speedup]:.2f} against {block[cache, warm][speedup]:.2f}",
    ),
    (
        "vllm-recorded",
        "1.05 times vLLM's `suffix` in tokens per step, retail, the same tasks",
        "{modes[precedent][tokens_per_step]:.2f} against {modes[suffix][tokens_per_step]:.2f}",
    ),
    (
        "steps",
        "1 ms of a step spent outside the forward, 0.15 ms of it on drafting",
        "{with a tree[outside_forward]:.1f} ms, {with a tree[parts][match and plan]:.2f} ms",
    ),
    (
        "store",
        "a cache of 100,000 completions read within 1 s of a later start",
        "{sizes[100000][later start][start_ms]!k:.2g} s, on another thread",
    ),
)
"""The file, the goal, and what was reached."""

MISSED = Table(
    ("goal", "reached", "on, by"),
    tuple(Line(file, (goal, reached, "{label}: `{command}`")) for file, goal, reached in REACHED),
)
