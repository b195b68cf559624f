"""The results of a replay, and how each contender compares with the best baseline that verifies no more nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from precedent_replay.contenders import Reliability
from precedent_replay.lineup import Entry
from precedent_replay.settings import MEASURED, Settings
from precedent_replay.simulate import Report, Tally
from precedent_replay.turns import Turn

TallyOf = Callable[[Report], Tally]

_KINDS: dict[str, TallyOf] = {
    "": lambda report: report.all,
    "_tool_calls": lambda report: report.tool_calls,
    "_text": lambda report: report.text,
}


GRAM = 4


def repeated_tokens(token_ids: Sequence[int]) -> int:
    """How many tokens end a run of `GRAM` tokens that occurred earlier in the same answer."""
    seen: set[tuple[int, ...]] = set()
    repeated = 0
    for end in range(GRAM, len(token_ids) + 1):
        gram = tuple(token_ids[end - GRAM : end])
        repeated += gram in seen
        seen.add(gram)
    return repeated


@dataclass(slots=True)
class Answers:
    """The measured answers of one kind of turn."""

    turns: int = 0
    tokens: int = 0
    exact_repeats: int = 0
    repeated: int = 0

    def add(self, turn: Turn, repeats: bool) -> None:
        """Count one answer; `repeats` says that it is word for word in the pool."""
        self.turns += 1
        self.tokens += len(turn.token_ids)
        self.exact_repeats += repeats
        self.repeated += repeated_tokens(turn.token_ids)

    def as_dict(self) -> dict[str, float]:
        """Counts, and the share of tokens in repeated runs."""
        return {
            "turns": self.turns,
            "tokens": self.tokens,
            "exact_repeats": self.exact_repeats,
            "repetition": round(self.repeated / self.tokens, 4) if self.tokens else 0.0,
        }


@dataclass(slots=True)
class Replay:
    """The results of a replay: one report per entry of the line-up, in order."""

    settings: Settings = field(default_factory=Settings)
    entries: Sequence[Entry] = ()
    reports: dict[str, Report] = field(default_factory=dict)
    tool_calls: Answers = field(default_factory=Answers)
    text: Answers = field(default_factory=Answers)

    @property
    def turns(self) -> int:
        """Number of measured answers."""
        return self.tool_calls.turns + self.text.turns

    @property
    def tokens(self) -> int:
        """Number of tokens in the measured answers."""
        return self.tool_calls.tokens + self.text.tokens

    @property
    def main(self) -> Entry | None:
        """The contender that pages and curves show: all drafters, with the first curve and the largest budget."""
        first = [entry for entry in self.entries if entry.whole and entry.curve == self.settings.curves[0]]
        return max(first, key=lambda entry: entry.budget or 0, default=None)

    @property
    def reliability(self) -> Reliability:
        """The main contender's estimates against outcomes."""
        main = self.main
        return getattr(main.contender, "reliability", Reliability()) if main else Reliability()

    def add(self, turn: Turn, repeats: bool) -> None:
        """Count a measured answer."""
        (self.tool_calls if turn.calls_tools else self.text).add(turn, repeats)

    def as_dict(self) -> dict[str, Any]:
        """The JSON of the command-line contract, with further keys."""
        tokens, repeated = max(1, self.tokens), self.tool_calls.repeated + self.text.repeated
        return {
            "turns": self.turns,
            "tokens": self.tokens,
            "exact_repeats": self.tool_calls.exact_repeats + self.text.exact_repeats,
            "repetition": round(repeated / tokens, 4),
            "kinds": {"tool_calls": self.tool_calls.as_dict(), "text": self.text.as_dict()},
            "settings": self.settings.as_dict(),
            "drafters": self._rows(),
        }

    def _rows(self) -> list[dict[str, Any]]:
        costs = {curve: self.settings.step_costs(curve) for curve in self.settings.curves}
        rows = []
        for entry in self.entries:
            row = self.reports[entry.name].as_dict(entry.name, costs)
            row |= {"baseline": entry.baseline, "budget": entry.budget, "curve": entry.curve}
            row |= {"without": entry.without, "whole": entry.whole}
            row |= {"main": entry is self.main, "speed_on_this_machine": self._speed(entry)}
            rows.append(row | self._against_baselines(entry) | self._against_whole(entry))
        for curve in costs:
            _rank(rows, curve)
        return rows

    def _speed(self, entry: Entry) -> float | None:
        """Speed-up over plain decoding by the step times measured on this machine, drafting included."""
        measured = self.settings.measured
        if measured is None:
            return None
        report = self.reports[entry.name]
        return round(report.speed(self.settings.step_costs(MEASURED), measured.plain), 3)

    def _against_baselines(self, entry: Entry) -> dict[str, Any]:
        """Tokens per step relative to the best baseline with no more nodes per step, by kind of turn."""
        if entry.baseline:
            return {}
        found: dict[str, Any] = {}
        for kind, tally_of in _KINDS.items():
            best = self._best_baseline(entry, tally_of)
            ours = tally_of(self.reports[entry.name])
            found[f"best_baseline{kind}"] = best.name if best else None
            found[f"ratio{kind}"] = _ratio(ours, tally_of(self.reports[best.name])) if best else None
        return found

    def _best_baseline(self, entry: Entry, tally_of: TallyOf) -> Entry | None:
        most = tally_of(self.reports[entry.name]).nodes_per_step
        baselines = [each for each in self.entries if each.baseline]
        fair = [each for each in baselines if tally_of(self.reports[each.name]).nodes_per_step <= most]
        return max(fair, key=lambda each: tally_of(self.reports[each.name]).tokens_per_step, default=None)

    def _against_whole(self, entry: Entry) -> dict[str, Any]:
        """The share of tokens per step that remains when an idea is left out, by kind of turn."""
        if not entry.without:
            return {}
        whole = next(
            each for each in self.entries if each.whole and (each.budget, each.curve) == (entry.budget, entry.curve)
        )
        return {
            f"left{kind}": _ratio(tally_of(self.reports[entry.name]), tally_of(self.reports[whole.name]))
            for kind, tally_of in _KINDS.items()
        }


def _ratio(ours: Tally, theirs: Tally) -> float | None:
    return round(ours.tokens_per_step / theirs.tokens_per_step, 4) if theirs.steps and ours.steps else None


def _rank(rows: list[dict[str, Any]], curve: str) -> None:
    """Rank the rows by tokens in the time of a plain step; 1 is the fastest."""

    def speed(row: dict[str, Any]) -> float:
        return float(row["tokens_per_plain_step_time_by_curve"][curve])

    for place, row in enumerate(sorted(rows, key=speed, reverse=True), start=1):
        row.setdefault("rank_by_curve", {})[curve] = place
