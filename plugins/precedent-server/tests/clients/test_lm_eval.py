"""lm-eval's `local-completions` on a real server: its log-likelihoods are those of a plain forward pass.

Its tasks read local files, and its tokenizer is the server's.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from precedent_server.keys import add_key
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

pytestmark = pytest.mark.clients

HERE = Path(__file__).parent
PYTHON = os.environ.get("PRECEDENT_LM_EVAL", str(HERE.parents[3] / ".venv-clients/bin/python"))
CHOICES = [
    {"question": f"Where is order {number}?", "choices": ["in the mail", "lost", "with the neighbours"], "answer": 1}
    for number in range(5)
]
TEXTS = [{"text": "Order 17 was sent on Monday. " * 30}, {"text": "Zoë"}]
TASKS = {
    "tiny_choice": (
        CHOICES,
        {"output_type": "multiple_choice", "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}"}
        | {"doc_to_target": "{{answer}}", "metric_list": [{"metric": "acc"}]},
    ),
    "tiny_rolling": (
        TEXTS,
        {"output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{text}}"}
        | {"metric_list": [{"metric": "bits_per_byte"}]},
    ),
}


@pytest.fixture(scope="module")
def evaluated(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What lm-eval says of all tasks."""
    folder = tmp_path_factory.mktemp("lm-eval")
    for name, (rows, task) in TASKS.items():
        data = folder / f"{name}.json"
        data.write_text("\n".join(map(json.dumps, rows)))
        files = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **files, **task}))  # JSON is YAML
    key = add_key(folder / "keys.json", "desk", "shop")
    ours = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    theirs = {"OPENAI_API_KEY": key, "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "PATH": os.environ["PATH"]}
    command = [sys.executable, str(HERE / "tiny_server.py"), str(folder / "keys.json")]
    with subprocess.Popen(command, text=True, env=ours, stdout=subprocess.PIPE) as server:
        try:
            address = server.stdout.readline().strip()
            done = subprocess.run(
                [PYTHON, str(HERE / "run_lm_eval.py"), address, key, str(folder), *TASKS],
                env=theirs, capture_output=True, text=True, check=False,
            )  # fmt: skip
        finally:
            server.send_signal(signal.SIGTERM)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def encode(text: str) -> list[int]:
    return list(byte_tokenizer().encode(text))


def logprob_of(before: list[int], text: list[int]) -> tuple[float, bool]:
    """The log-likelihood of a text, and whether greedy decoding would write it."""
    logits = tiny_causal_lm("llama", seed=21)(torch.tensor([[*before, *text]])).logits[0].detach()
    rows = logits.log_softmax(-1)[len(before) - 1 : -1]
    return float(rows[range(len(text)), text].sum()), rows.argmax(-1).tolist() == text


def test_the_likelihoods_of_choices(evaluated: Any) -> None:
    samples = evaluated["samples"]["tiny_choice"]
    assert len(samples) == len(CHOICES)
    for sample in samples:
        for (question, choice), ((found, greedy),) in zip(sample["arguments"], sample["resps"], strict=True):
            expected = logprob_of(encode(question), encode(choice))
            assert found == pytest.approx(expected[0], abs=1e-4)
            assert greedy is expected[1]
    assert 0 <= evaluated["results"]["tiny_choice"]["acc,none"] <= 1


def test_the_likelihoods_of_whole_texts(evaluated: Any) -> None:
    """In windows of 511 tokens, the first after the token of beginnings: as lm-eval divides them."""
    samples, prefix = evaluated["samples"]["tiny_rolling"], int(byte_tokenizer().bos_token_id)
    assert len(samples) == len(TEXTS)
    for sample in samples:
        (text,), ((found,),) = sample["arguments"][0], sample["resps"]
        ids = encode(text)
        whole = [prefix, *ids]
        expected, window = 0.0, 510
        for start in range(0, len(ids), window):
            end = min(start + window, len(ids))
            first = max(0, end - window) if start else 0
            expected += logprob_of(whole[first : start + 1], ids[start:end])[0]
        assert found == pytest.approx(expected, abs=1e-3)
