"""Processes that hold a model together, forked from one that has imported everything: imports take longest.

    python tests/target/divided_program.py

Reads commands as JSON, one a line: a scenario, its settings, a folder for what each process prints and finds out, and
the environment of every process. Answers with their process ids, and once all have ended with their exit codes. Run by
`test_tensor_parallel.py`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from precedent.cache import NewCompletion, SpeculationCache
from precedent.config import SamplingParams, SpeculationConfig
from precedent.engine.engine import Engine
from precedent.errors import PrecedentError
from precedent.langchain import ChatPrecedent
from precedent.planning.costs import CostCurve
from precedent.target import TargetModel
from precedent.target.load.loading import load_target
from precedent.target.parallel import processes
from precedent.testing.embedders import HashEmbedder

PLAIN = SpeculationConfig(enabled=False, write_back=False)
PROMPT = list(b"look up order 17, then order 18, then order 19")
PROMPTS = [PROMPT, PROMPT[:30], list(b"a refund, please")]
GREEDY = SamplingParams(max_tokens=24)
SEEDED = SamplingParams(max_tokens=24, temperature=0.9, seed=7)

PATIENCE = 600
"""Seconds after which processes that should have ended are killed; the first may have inner loops to compile."""


def answers(target: str, **loading: Any) -> dict[str, Any]:
    """What an engine answers, plain and in every way in which trees, prefixes and batches come about."""
    cache = SpeculationCache.open(None, embedder=HashEmbedder())
    with closing(Engine.load(target, cache=cache, **loading)) as engine:
        engine.planner.cost = CostCurve()
        found: dict[str, Any] = {"plain": texts(engine, GREEDY, PLAIN), "seeded plain": texts(engine, SEEDED, PLAIN)}
        found["cold"], found["warm"] = texts(engine, GREEDY), texts(engine, GREEDY)
        poison(cache, engine, found["plain"])
        found["adversarial"], found["seeded"] = texts(engine, GREEDY), texts(engine, SEEDED)
        found["together"] = [generation.result().token_ids for generation in started(engine)]
        turn = [*PROMPT, *found["plain"][0], *b" and then?"]
        found["turns"] = [engine.submit(turn, GREEDY, tenant=tenant).result().token_ids for tenant in ("default", "b")]
        metrics = engine.metrics()
        found["accepted"], found["reused"] = metrics.num_accepted_tokens, metrics.cached_prompt_tokens
        found["fingerprint"] = engine.model_fingerprint
    return found


def texts(engine: Engine, sampling: SamplingParams, speculation: SpeculationConfig | None = None) -> list[Any]:
    """Answers to all prompts, one after the other."""
    asked: dict[str, Any] = {"speculation": speculation, "query": "order"}
    return [engine.submit(prompt, sampling, **asked).result().token_ids for prompt in PROMPTS]


def started(engine: Engine) -> list[Any]:
    """All prompts at once."""
    return [engine.submit(prompt, GREEDY, query="order") for prompt in PROMPTS]


def poison(cache: SpeculationCache, engine: Engine, answered: list[tuple[int, ...]]) -> None:
    """Completions that begin like an answer and then go wrong."""
    for answer in answered:
        for cut, wrong in ((1, 65), (3, 7), (5, 258), (9, 66)):
            tokens = (*answer[:cut], wrong, *answer[cut + 1 :])
            cache.insert(NewCompletion(tokens, engine.tokenizer_fingerprint, "another", query="order"))


def chat(target: str, **loading: Any) -> dict[str, Any]:
    """What a chat model answers; it is one of LangChain's own."""
    model = ChatPrecedent(model=target, max_tokens=24, **loading)
    copied = model.model_copy(update={"temperature": 0.7, "seed": 3})
    return {"texts": [each.invoke("order 17").content for each in (model, copied)]}


def raising(target: str) -> dict[str, Any]:
    """The first process fails somewhere in its own code."""
    engine = Engine.load(target, tensor_parallel=True)
    raise ValueError(engine.model_name)


def killed(target: str) -> dict[str, Any]:
    """The first process is gone from one moment to the next."""
    Engine.load(target, tensor_parallel=True)
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


def left_alone(target: str, timeout: float | None = None) -> dict[str, Any]:
    """The other process ends, or stops, while the engine has nothing to do."""
    if timeout is not None:
        processes.TIMEOUT = timedelta(seconds=timeout)
    with closing(Engine.load(target, tensor_parallel=True)) as engine:
        Path("ready").touch()
        while not Path("go").exists():
            time.sleep(0.01)
        return {"errors": [error_of(generation.result) for generation in (*started(engine), *started(engine))]}


def refused(target: str, undivided: str, draft_model: str | None) -> dict[str, Any]:
    """What a model that cannot be loaded says, what a second one, and what a model that was divided elsewhere."""
    errors = {"elsewhere": error_of(lambda: TargetModel(load_target(target, num_processes=2)[0]))}
    errors["first"] = error_of(lambda: Engine.load(undivided, draft_model=draft_model, tensor_parallel=True))
    errors["second"] = error_of(lambda: Engine.load(target, tensor_parallel=True))
    return errors


def error_of(action: Any) -> str:
    """How an action that must fail does."""
    try:
        action()
    except PrecedentError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


SCENARIOS = {each.__name__: each for each in (answers, chat, raising, killed, left_alone, refused)}


def main() -> None:
    """Fork the processes of each command, and wait for them."""
    for line in sys.stdin:
        command = json.loads(line)
        pids = [forked(command, environment) for environment in command["environments"]]
        print(json.dumps(pids), flush=True)
        print(json.dumps(exit_codes(pids)), flush=True)


def forked(command: dict[str, Any], environment: dict[str, str]) -> int:
    """Start one process of a scenario; what it finds out goes to a file of its rank."""
    pid = os.fork()
    if pid:
        return pid
    os.environ.update(environment)
    os.chdir(command["folder"])
    own = Path(environment["RANK"])
    printed = os.open(own.with_suffix(".txt"), os.O_CREAT | os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(printed, stream)
    torch.set_num_threads(1)
    found = SCENARIOS[command["scenario"]](**command["settings"])
    own.with_suffix(".part").write_text(json.dumps(found), encoding="utf-8")
    own.with_suffix(".part").rename(own.with_suffix(".json"))
    sys.exit(0)


def exit_codes(pids: list[int]) -> list[int]:
    """How all of these processes end; those that do not are killed."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE
    while len(codes) < len(pids):
        for pid in set(pids) - codes.keys():
            if time.monotonic() > deadline:
                os.kill(pid, signal.SIGKILL)
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    main()
