"""What `train-draft` and `measure-draft` say of drafts: measured on the target's answers to held-out prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from precedent.cli.progress import Progress
from precedent.runtime.machine_load import BUSY_SHARE, OtherPrograms

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from precedent_drafts.training.prompts import Prompt

REPORT_FILE = "report.json"

HELD_OUT_SEED = 1 << 40
"""Added to the seeds for answers to held-out prompts."""


def report_on(
    progress: Progress,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    drafts: Mapping[str, PreTrainedModel],
    held_out: Sequence[Prompt],
    temperature: float,
    answer_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """The reports on drafts of any kind, on the target's answers to held-out prompts."""
    from precedent.target.fingerprints import name_of
    from precedent_drafts.training.lessons import Author
    from precedent_drafts.training.measure import BlockReport, Measurement

    others, first_seed = OtherPrograms(), seed + HELD_OUT_SEED
    progress.show("answering held-out prompts", 0, len(held_out))
    with closing(Author(model, tokenizer, temperature)) as author:
        texts = author.texts(held_out, range(first_seed, first_seed + len(held_out)), answer_tokens)
    report: dict[str, Any] = {"target": name_of(model)}
    measurement = Measurement(model, texts, temperature)
    for name, draft in drafts.items():
        found = measurement.report(name, draft, partial(progress.show, f"measuring {name}"))
        report.setdefault("blocks" if isinstance(found, BlockReport) else "drafts", []).append(asdict(found))
    share = others.share()
    return report | {"others_cpu_share": None if share is None else round(share, 3)}


def show_report(report: Mapping[str, Any]) -> None:
    """Tables of a report."""
    if "drafts" in report:
        _show_chains(report["target"], report["drafts"])
    if "blocks" in report:
        _show_blocks(report["blocks"])
    busy = report["others_cpu_share"]
    if busy is not None and busy > BUSY_SHARE:
        Console().print(
            f"other programs used {busy:.0%} of the CPU meanwhile: acceptance holds, but milliseconds, cost and speed "
            "do not (run measure-draft again on an idle machine)",
            highlight=False,
        )


def _show_chains(target: str, reports: Sequence[dict[str, Any]]) -> None:
    table = _table(
        f"target {target}: {reports[0]['target_milliseconds']:.1f} ms per step",
        ("draft", "accepted", "same", "ms", "cost", "draws", "per step", "speed"),
    )
    for each in reports:
        by_draw = each["acceptance_by_draw"]
        table.add_row(
            Path(each["draft"]).name,
            f"{by_draw[0]:.3f}" if len(by_draw) == 1 else " ".join(f"{share:.2f}" for share in by_draw),
            f"{each['agreement']:.3f}", f"{each['draw_milliseconds']:.1f}", f"1/{1 / each['cost']:.1f}",
            str(each["best_draws"]), f"{each['tokens_per_step']:.2f}", f"{each['speed']:.2f}x",
        )  # fmt: skip
    Console().print(table)


def _show_blocks(reports: Sequence[dict[str, Any]]) -> None:
    table = _table(
        f"block drafts, target: {reports[0]['target_milliseconds']:.1f} ms per step",
        ("draft", "accepted, by position", "ms", "cost", "nodes", "per step", "speed"),
    )
    for each in reports:
        table.add_row(
            Path(each["draft"]).name, " ".join(f"{share:.2f}" for share in each["acceptance"]),
            f"{each['forward_milliseconds']:.1f}", f"1/{1 / each['cost']:.1f}", str(each["nodes"]),
            f"{each['tokens_per_step']:.2f}", f"{each['speed']:.2f}x",
        )  # fmt: skip
    Console().print(table)


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column == "draft" else "right")
    return table
