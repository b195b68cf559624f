"""Which calls are the same: a tool's schema decides, and what it cannot write down still tells calls apart."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Any

import pydantic.v1
import pytest
from langchain_core.tools import StructuredTool
from pydantic import AfterValidator, ConfigDict, Field, PlainSerializer, SecretStr, create_model

from precedent_run_ahead.running import key_of

Amount = create_model("Amount", order=(str, ...), number=(int, 1))
"""Arguments that may be written in more than one way."""

Secret = create_model("Secret", token=(SecretStr, ...))
"""JSON writes stars for every secret."""

Hidden = create_model("Hidden", order=(str, ...), reason=(str, Field("none", exclude=True)))
"""JSON leaves a field out."""

Rounded = create_model("Rounded", amount=(Annotated[Decimal, PlainSerializer(lambda amount: f"{amount:.1f}")], ...))
"""JSON writes fewer digits than the tool gets."""

Folded = create_model("Folded", order=(Annotated[str, AfterValidator(str.lower)], ...))
"""The tool gets one of two writings."""

Aliased = create_model("Aliased", order=(str, Field(alias="orderId")))
"""The model writes another name than the tool reads."""

Open = create_model("Open", __config__=ConfigDict(extra="allow"), order=(str, ...))
"""The tool gets what the schema does not name."""

Anything = create_model("Anything", value=(Any, ...))
"""Python calls some of these values equal; a tool can tell them apart."""


class Old(pydantic.v1.BaseModel):
    """A schema of pydantic's version 1: arguments are compared as they are."""

    order: str
    reason: str = pydantic.v1.Field("none", exclude=True)


JSON = {"type": "object", "properties": {"order": {"type": "string"}}, "required": ["order"]}
"""Another schema whose arguments are compared as they are."""


@pytest.mark.parametrize(
    ("schema", "one", "other", "equal"),
    [
        (Amount, {"order": "W7"}, {"order": "W7", "number": 1}, True),
        (Amount, {"number": "2", "order": "W7"}, {"order": "W7", "number": 2}, True),
        (Amount, {"order": "W7", "unknown": 5}, {"order": "W7"}, True),
        *((Amount, {"order": "W7"}, {"order": other}, False) for other in ("w7", "W7 ")),
        (Amount, {"order": "W7", "number": 1}, {"order": "W7", "number": 2}, False),
        *((Amount, refused, refused, False) for refused in ("W7", {"number": 2})),
        (Secret, {"token": "a"}, {"token": "b"}, False),
        (Secret, {"token": "a"}, {"token": "a"}, True),
        (Secret, {"token": "**********"}, {"token": "b"}, False),
        (Hidden, {"order": "W7", "reason": "x"}, {"order": "W7", "reason": "y"}, False),
        (Hidden, {"order": "W7", "reason": "x"}, {"order": "W7"}, False),
        (Hidden, {"order": "W7", "reason": "none"}, {"order": "W7"}, True),
        (Rounded, {"amount": "1.23"}, {"amount": "1.2"}, False),
        (Rounded, {"amount": "1.23"}, {"amount": "1.23"}, True),
        (Folded, {"order": "W7"}, {"order": "w7"}, True),
        (Aliased, {"orderId": "W7"}, {"orderId": "W7", "unknown": 1}, True),
        (Aliased, {"orderId": "W7"}, {"orderId": "W8"}, False),
        (Open, {"order": "W7", "note": 1}, {"order": "W7", "note": 2}, False),
        *((Anything, {"value": 1}, {"value": other}, False) for other in (True, 1.0)),
        (Anything, {"value": float("nan")}, {"value": float("nan")}, False),
        (Old, {"order": "W7", "reason": "x"}, {"order": "W7", "reason": "y"}, False),
        (Old, {"order": "W7", "reason": "x"}, {"reason": "x", "order": "W7"}, True),
        (JSON, {"order": "W7"}, {"order": "W7"}, True),
        (JSON, {"order": "W7"}, {"order": "W8"}, False),
    ],
)
def test_calls_are_equal_if_the_schema_reads_the_same_of_them(schema: Any, one: Any, other: Any, equal: bool) -> None:
    """What JSON would lose still tells calls apart."""
    made = StructuredTool(name="look_up", description="Look up.", args_schema=schema, func=lambda **given: "")
    keys = key_of(made, one), key_of(made, other)
    assert (keys[0] == keys[1] and keys[0] is not None) == equal
