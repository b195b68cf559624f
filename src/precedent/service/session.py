"""One request of a drafting service."""

from __future__ import annotations

from collections.abc import Sequence

from precedent.tree import CandidateTree


class DraftingSession:
    """Drafts for one request of another engine, until `end`; made by `DraftingService.begin`.

    Call `committed` after every step of that engine, then `chain` or `tree` for the next one. A service's sessions may
    be used on several threads, one session on one thread at a time.
    """

    request_id: str

    def committed(self, token_ids: Sequence[int]) -> None:
        """Report the tokens that the target committed since the last call: accepted ones and its own.

        The first tokens are compared with the last chain or tree: that is how acceptance is learned, so report what the
        target chose even if it never saw the draft. Raises PromptError for what is not a token id, and then nothing is
        taken over.
        """
        raise NotImplementedError

    def chain(self, max_tokens: int) -> list[int]:
        """At most `max_tokens` tokens to verify after the committed ones; `[]` if none pay off.

        Of all paths through the drafters' candidates, it is the one with the most expected tokens per millisecond: the
        sum of its prefixes' probabilities, and one for the target's own token, over the time of a step of its width.
        Where width costs nothing, that is the path with the largest sum. Raises ConfigError for a negative number.
        """
        raise NotImplementedError

    def tree(self, max_nodes: int) -> CandidateTree:
        """The same as a tree of at most `max_nodes` fixed candidates, for an engine that verifies trees."""
        raise NotImplementedError

    def end(self) -> None:
        """Release everything; the session drafts nothing afterwards. May be called again."""
        raise NotImplementedError
