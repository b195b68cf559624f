"""`precedent serve`: what it refuses before it loads anything, where its options come from, and its access log."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.command_line import run_cli

from precedent.errors import ConfigError
from precedent.server import running
from precedent.server.stored_keys import add_key
