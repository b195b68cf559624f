"""Runs lm-eval's `local-completions` on tasks of a folder: `python run_lm_eval.py ADDRESS KEY FOLDER TASK...`.

Prints the samples of every task as JSON. Runs in the environment of lm-eval.
"""

from __future__ import annotations

import json
import sys

import lm_eval
from lm_eval.tasks import TaskManager

if __name__ == "__main__":
    address, key, folder, *tasks = sys.argv[1:]
    settings = {
        "model": "tiny",
        "base_url": f"{address}/v1/completions",
        "auth_token": key,  # for the tokenizer, which is the server's; completions read OPENAI_API_KEY
        "max_length": 512,
        "num_concurrent": 4,
        "batch_size": 2,
    }
    results = lm_eval.simple_evaluate(
        "local-completions",
        model_args=settings,
        tasks=tasks,
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        bootstrap_iters=0,
    )
    samples = {
        task: [{"arguments": one["arguments"], "resps": one["resps"]} for one in results["samples"][task]]
        for task in tasks
    }
    print("\n" + json.dumps({"samples": samples, "results": results["results"]}, default=str))
