"""The translation pair of the encoder-decoder benchmark: its language has a rule, and its training and table run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from seq2seq_bench.language import canonical, number_words, pair  # noqa: E402
from seq2seq_bench.training import word_tokenizer  # noqa: E402


@pytest.mark.parametrize(
    ("number", "words"),
    [(7, "sieben"), (12, "zwölf"), (13, "drei zehn"), (21, "ein und zwanzig"), (40, "vierzig"),
     (101, "ein hundert eins"), (2316, "zwei tausend drei hundert sechs zehn")],
)  # fmt: skip
def test_numbers_in_words(number: int, words: str) -> None:
    assert " ".join(number_words(number)) == words


def test_every_word_has_a_token_and_right_translations_share_one_text() -> None:
    tokenizer = word_tokenizer()
    for seed in range(300):
        note = pair(seed)
        assert tokenizer.unk_token_id not in tokenizer.encode(f"{note.source} {note.target}")
        assert pair(seed) == note
    assert canonical("das alte Schiff befördert danach") == canonical("das alte Schiff bringt dann")


@pytest.mark.slow
def test_the_benchmark_prints_its_table() -> None:
    """A few steps of training: nothing is learnt, and exact verification still says what plain decoding says."""
    script = [sys.executable, BENCHMARKS / "bench_seq2seq.py", "--steps", "4", "--notes", "2", "--draws", "2"]
    lines = subprocess.run(script, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["way", "plain", "greedy"]
    assert lines[2].split()[-1] == "100.0%"
    assert len(lines) == 11
