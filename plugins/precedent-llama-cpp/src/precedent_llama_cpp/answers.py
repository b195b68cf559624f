"""Tells when a `Llama` has finished an answer, and its token ids: nothing else of it does."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

Finished = Callable[[list[int], list[int]], None]
"""Takes the token ids of a prompt and of its finished answer."""


def watch(model: Any, finished: Finished) -> None:
    """Wrap `generate`, which has the ids, and `create_completion`, which says that an answer ended, of one `Llama`.

    Chats pass through both. An answer that fails, or whose stream nobody reads to its end, is not finished.
    """
    generate, create = model.generate, model.create_completion
    answers: list[tuple[list[int], list[int]]] = []

    def generating(tokens: Sequence[int], *arguments: Any, **named: Any) -> Generator[int, Any, None]:
        answer: list[int] = []
        answers[:] = [(list(tokens), answer)]
        inner = generate(tokens, *arguments, **named)
        try:
            token = next(inner)
            while True:
                answer.append(token)
                token = inner.send((yield token))
        except StopIteration:
            return
        finally:
            inner.close()

    def tell(completion: Any) -> None:
        if answers and completion["choices"][0]["finish_reason"] is not None:
            finished(*answers.pop())

    def creating(*arguments: Any, **named: Any) -> Any:
        answers.clear()
        made = create(*arguments, **named)
        if not isinstance(made, dict):
            return _told(made, tell)
        tell(made)
        return made

    model.generate, model.create_completion = generating, creating


def _told(chunks: Iterator[Any], tell: Callable[[Any], None]) -> Iterator[Any]:
    for chunk in chunks:
        tell(chunk)
        yield chunk
