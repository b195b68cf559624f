"""The replay page: the figures, one candidate tree, and answers coloured by the source of each token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from precedent.pages.colours import Palette
from precedent.pages.render import page, pieces
from precedent.pages.tree_picture import SeenTree, tree_svg
from precedent.tree import CandidateTree
from precedent_replay.baselines import Contender
from precedent_replay.contenders import Drafted
from precedent_replay.results import Watch
from precedent_replay.table import verdict
from precedent_replay.turns import Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COLUMNS = (
    "name", "tokens_per_step", "ratio", "tokens_per_step_tool_calls", "tokens_per_step_text", "draft_tokens_per_step",
    "tokens_per_plain_step_time", "microseconds_per_step",
)  # fmt: skip


class ShownTurns:
    """Keeps at most `most` turns with the sources of their tokens, and the most interesting tree."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.turns: list[tuple[Turn, Sequence[str]]] = []
        self.tree: SeenTree | None = None

    def watch(self, contender: Contender) -> Watch | None:
        """A callback for every step of a turn that keeps the most interesting tree; None if nothing is kept."""
        if not isinstance(contender, Drafted) or not self._most:
            return None

        def look(tree: CandidateTree, path: Sequence[int], before: Sequence[int]) -> None:
            seen = SeenTree(tree, tuple(path), tuple(before), tuple(contender.estimates.tolist()))
            if seen.interest > (self.tree.interest if self.tree else 0.0):
                self.tree = seen

        return look

    def add(self, turn: Turn, sources: Sequence[str]) -> None:
        """Keep a turn, with the source of each token, if there is room."""
        if len(self.turns) < self._most:
            self.turns.append((turn, sources))


def replay_page(results: Mapping[str, Any], shown: ShownTurns, tokenizer: PreTrainedTokenizerBase) -> str:
    """Render one HTML document: verdict, table, tree, and answers coloured by the source of each token."""
    palette = Palette()
    counts = Counter(source for _, sources in shown.turns for source in sources)

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    return page(
        "replay.html.jinja",
        title="What would speculation gain?",
        verdict=verdict(results),
        summary=f"{results['turns']} turns, {results['tokens']} tokens; {results['exact_repeats']} answers are word "
        f"for word in the pool; {results['repetition']:.1%} of the tokens repeat four tokens of their own answer.",
        headings=[column.replace("_", " ") for column in _COLUMNS],
        rows=[[_cell(row.get(column)) for column in _COLUMNS] for row in results["drafters"]],
        pictures=[] if shown.tree is None else [Markup(tree_svg(shown.tree, decode, palette))],
        legend=palette.legend(counts),
        counts=counts,
        answers=[pieces(turn.token_ids, sources, decode, palette) for turn, sources in shown.turns],
    )


def _cell(value: Any) -> str:
    return "" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
