"""Keeps invalid arguments invalid: LangChain would repair truncated JSON by completing or cutting it.

A seal makes the text irreparable: it ends an open string and closes a bracket that was never opened.
"""

from __future__ import annotations

import re

from precedent.text.tool_formats.json_scanner import JsonScanner

ARGUMENTS, WHOLE = "<invalid>", "<invalid call>"
_SEAL = re.compile(rf'(?:"| )[\]}}]({ARGUMENTS}|{WHOLE})\Z')


def seal_of(text: str, mark: str) -> str:
    """The seal to append to a broken call; `mark` is ARGUMENTS for the text after its name, WHOLE for all of it."""
    scanner, open_brackets = JsonScanner(), [""]
    for char in text:
        scanner.step(char)
        if scanner.in_string:
            continue
        if char in "{[":
            open_brackets.append(char)
        elif char in "}]" and len(open_brackets) > 1:
            open_brackets.pop()
    quote = ('\\"' if scanner.escaped else '"') if scanner.in_string else " "
    return f"{quote}{'}' if open_brackets[-1] == '[' else ']'}{mark}"


def unsealed(text: str) -> tuple[str, str | None]:
    """Return the text without its seal and the seal's mark, None if there is no seal."""
    seal = _SEAL.search(text)
    return (text, None) if seal is None else (text[: seal.start()], seal[1])
