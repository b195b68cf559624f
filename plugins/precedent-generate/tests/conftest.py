"""Fixtures that the tests of `custom_generate` share."""

from __future__ import annotations

import pytest
from helpers.generating import made
from transformers import PreTrainedModel


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return made()
