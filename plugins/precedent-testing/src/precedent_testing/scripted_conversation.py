r"""Scripts as conversations: each answer is given only to the prompt that holds everything before it.

A conversation is a list of lines:

    [
        ("user", "Where is order 7?"),
        ("assistant", '<tool_call>\n{"name": "look_up", "arguments": {"number": "7"}}\n</tool_call>'),
        ("tool", "order 7 is open"),
        ("assistant", "It is open."),
    ]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from precedent.errors import ConfigError, GenerationError
from precedent_testing.scripted_prompt import BEGIN, Said, Turn, missing, turns_of

Line = tuple[str, str]
"""The role ("system", "user", "assistant" or "tool") and the text; an assistant's calls are in the model's format."""

ROLES = ("system", "user", "assistant", "tool")


def conversations(*scripts: Sequence[Line]) -> Callable[[str], str]:
    """A script of several conversations: a prompt is answered by the first one that it follows.

    The script raises GenerationError for a prompt that follows none, and says what is missing for each. Raises
    ConfigError for a script that is not a conversation.
    """
    for script in scripts:
        _check(script)

    def answer(prompt: str) -> str:
        turns, reasons = turns_of(re.split(f"(?={re.escape(BEGIN)})", prompt)), list[str]()
        for script in scripts:
            reply, lack = _reply(script, turns)
            if lack is None:
                return reply
            reasons.append(lack)
        raise GenerationError(f"the prompt follows no conversation of the script: {'; '.join(reasons)}")

    return answer


def _reply(script: Sequence[Line], turns: Sequence[Turn]) -> tuple[str, str | None]:
    """The answer that follows the turns, and a description of what they lack for it, or None."""
    if [turn.role for turn in turns] == [""]:
        return "", "its prompts are not ChatML; give a function of the prompt"
    places = [place for place, (role, _) in enumerate(script) if role == "assistant"]
    given = sum(turn.role == "assistant" for turn in turns)
    if given >= len(places):
        return "", f"it has {len(places)} answers, and the prompt holds {given}"
    before = [Said(role, (text,)) for role, text in script[: places[given]]]
    return script[places[given]][1], missing(before, turns)


def _check(script: Sequence[Line]) -> None:
    for line in script:
        if not isinstance(line, tuple | list) or len(line) != 2 or line[0] not in ROLES:
            raise ConfigError(f"{line!r} is not a line of a conversation: give (role, text), with a role of {ROLES}")
