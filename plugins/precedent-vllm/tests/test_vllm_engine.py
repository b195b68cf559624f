"""What is asked of vLLM itself: its runner, its rejection sampler, its processes' environment."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precedent.errors import ConfigError, UnsupportedError
from precedent_vllm.counts import Publisher, prometheus_text
from precedent_vllm.engine import announce
from precedent_vllm.note import Note, seal, unseal
from precedent_vllm.rejection import Expand, check, expands, takes_no_rows
from precedent_vllm.settings import Settings


def max_of_all(logits: Any, k: Any, p: Any) -> Any:
    """What vLLM 0.32 does on a CPU: it looks for the largest k, which no rows do not have."""
    return logits if k is None and p is None else logits.topk(int(k.max()), dim=1).values


def right_top_k(logits: Any, k: Any, p: Any) -> Any:
    return logits


class Sampler(SimpleNamespace):
    """The part of vLLM's module `rejection_sampler` at stake."""

    def __init__(self, expand: Any, top_k: Any = right_top_k) -> None:
        super().__init__(_expand=expand, apply_top_k_top_p=top_k)

    def expand_batch_to_tokens(
        self, x: Any, ends: Any, num_tokens: int, replace_from: int = 0, replace_to: int = 0
    ) -> Any:
        """As vLLM 0.32 has it; memory that nobody wrote holds what the last user left."""
        expanded = torch.full((num_tokens,), 7, dtype=x.dtype)
        self._expand(expanded, x, ends, replace_from, replace_to)
        return expanded


def into_a_copy(output: Any, values: Any, ends: Any, replace_from: int, replace_to: int) -> None:
    """What vLLM 0.32 does on a CPU without Triton: it writes into a copy of another type."""
    Expand()(output.to(torch.int64), values.to(torch.int64), ends, replace_from, replace_to)


def test_a_sampler_that_is_wrong_is_found_and_mended_once() -> None:
    sampler = Sampler(into_a_copy, max_of_all)
    assert not expands(sampler)
    assert not takes_no_rows(sampler)
    check(sampler, mendable=True, version="0.32.0")
    assert expands(sampler)
    assert takes_no_rows(sampler)
    sampler._expand.register_warmup()
    mended = sampler._expand, sampler.apply_top_k_top_p
    check(sampler, mendable=True, version="0.32.0")
    assert (sampler._expand, sampler.apply_top_k_top_p) == mended
    logits, k = torch.tensor([[1.0, 3.0, 2.0]]), torch.tensor([2])
    assert torch.equal(sampler.apply_top_k_top_p(logits, k, None), max_of_all(logits, k, None))


@pytest.mark.parametrize(
    ("sampler", "what"),
    [(Sampler(into_a_copy), "arbitrary temperatures"), (Sampler(Expand(), max_of_all), "ends the whole engine")],
    ids=["temperatures", "top-k"],
)
def test_a_sampler_that_cannot_be_mended_is_refused(sampler: Sampler, what: str) -> None:
    before = dict(vars(sampler))
    with pytest.raises(UnsupportedError, match=rf"0\.29\.0 samples wrongly on this machine: .*{what}"):
        check(sampler, mendable=False, version="0.29.0")
    assert vars(sampler) == before


class Runner:
    """The two methods of vLLM's runner that are wrapped."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.requests = drafter, dict[str, int]()

    def _update_states(self, scheduled: int) -> str:
        self.requests["new"] = scheduled
        return "deferred"

    def propose_draft_token_ids(self, *what: Any, **named: Any) -> Any:
        return what, named, getattr(self.drafter, "runner", None)


class Ours:
    runner: Any = None

    def __init__(self) -> None:
        self.seen: list[dict[str, int]] = []

    def arrived(self, requests: dict[str, int]) -> None:
        self.seen.append(dict(requests))


def announced() -> type[Runner]:
    """A class of its own: wrapping changes it."""
    kind = type(
        "Fresh", (Runner,), {name: vars(Runner)[name] for name in ("_update_states", "propose_draft_token_ids")}
    )
    for _ in range(3):
        announce(kind, Ours)
    return kind


def test_a_runner_makes_itself_known_at_each_step() -> None:
    """Once, however often it is asked for; and never to a drafter that is not ours."""
    kind = announced()
    one, other, foreign = kind(Ours()), kind(Ours()), kind(object())
    assert one.propose_draft_token_ids(1, two=2) == ((1,), {"two": 2}, one)
    assert other.propose_draft_token_ids() == ((), {}, other)
    assert foreign.propose_draft_token_ids() == ((), {}, None)
    wrapped = kind.propose_draft_token_ids
    announce(kind, Ours)
    assert kind.propose_draft_token_ids is wrapped


def test_a_runner_tells_its_drafter_of_new_requests_before_they_are_computed() -> None:
    kind = announced()
    one, foreign = kind(Ours()), kind(object())
    assert one._update_states(7) == foreign._update_states(8) == "deferred"
    assert one.drafter.seen == [{"new": 7}]


def ran(statements: str, **environment: str) -> str:
    """What a new process prints after these statements."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PRECEDENT_VLLM")}
    done = subprocess.run(
        [sys.executable, "-c", statements], capture_output=True, text=True, check=True, env={**clean, **environment}
    )
    return done.stdout.strip()


def test_what_vllm_loads_first_loads_no_numba() -> None:
    """Or its CPU workers do not start, since vLLM looks into every object of every module."""
    statements = "import sys, precedent_vllm.plugin as p; p.register(); print(*sys.modules)"
    assert not {"numba", "llvmlite", "torch", "vllm"} & set(ran(statements).split())


def test_all_processes_share_a_secret_and_a_folder_that_goes_with_the_first() -> None:
    child = "import os; from precedent_vllm.plugin import register; register()"
    show = "print(os.environ['PRECEDENT_VLLM_SECRET'], os.environ['PRECEDENT_VLLM_FOLDER'])"
    parent = (
        f"{child}; register(); import sys, stat, subprocess; {show}; "
        "print(oct(stat.S_IMODE(os.stat(os.environ['PRECEDENT_VLLM_FOLDER']).st_mode)), flush=True); "
        f"subprocess.run([sys.executable, '-c', {f'{child}; {show}'!r}]); "
        "print(os.path.isdir(os.environ['PRECEDENT_VLLM_FOLDER']))"
    )
    first, mode, second, still_there = ran(parent).splitlines()
    secret, folder = first.split()
    assert (first, mode, still_there) == (second, oct(stat.S_IRWXU), "True")
    assert len(secret) == 64
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({"PRECEDENT_VLLM_STOER": "x"}, "PRECEDENT_VLLM_STOER is no setting"),
        ({"PRECEDENT_VLLM": "maybe"}, "must be on or off"),
        ({"PRECEDENT_VLLM_TENANT": "a", "PRECEDENT_VLLM_API_KEYS": "k.json"}, "keys name their tenants"),
        *(
            ({"PRECEDENT_VLLM_STEP_COST": text}, "must give milliseconds by tokens")
            for text in (
                "20",
                "{}",
                '{"0": 20}',
                '{"1": -1}',
                '{"1": NaN}',
                "{",
            )
        ),
    ],
)
def test_settings_that_do_not_fit_are_refused(variables: dict[str, str], error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Settings.read(variables)


def test_settings_are_what_the_environment_says() -> None:
    read = Settings.read(
        {
            "PRECEDENT_VLLM": "OFF", "PRECEDENT_VLLM_STORE": "postgresql://db/precedent", "PRECEDENT_VLLM_SECRET": "s",
            "PRECEDENT_VLLM_API_KEYS": "k.json", "PRECEDENT_VLLM_DRAFTERS": "prompt, recall", "HOME": "/x",
            "PRECEDENT_VLLM_STEP_COST": '{"1": 20, "17": 24.5}',
        }
    )  # fmt: skip
    assert read == Settings(
        on=False, store="postgresql://db/precedent", secret=b"s", api_keys=Path("k.json"),
        drafters=("prompt", "recall"), step_cost={1: 20.0, 17: 24.5},
    )  # fmt: skip
    assert Settings.read({}) == Settings()


@given(st.builds(Note, st.booleans(), st.none() | st.text(), st.text(), st.text(), st.text(), st.none() | st.text()))
def test_a_sealed_note_comes_out_as_it_went_in(note: Note) -> None:
    told = seal(note, b"secret")
    assert unseal(told, b"secret") == note
    assert unseal(told, b"other") is None
    assert unseal(told, b"") is None


def test_counts_are_written_where_they_changed(tmp_path: Path) -> None:
    counts = {
        "precedent:spec_decode_num_accepted_tokens": {'source="recall"': 5},
        "precedent:refused_requests": {"": 1},
    }
    publisher = Publisher(tmp_path, lambda: counts, seconds=1e6)
    publisher.write()
    (file,) = tmp_path.iterdir()
    written = file.stat().st_mtime_ns
    publisher.write()
    assert file.stat().st_mtime_ns == written
    publisher.close()
    process = file.stem.removeprefix("counts-")
    text = prometheus_text(tmp_path)
    assert f'precedent:spec_decode_num_accepted_tokens_total{{process="{process}",source="recall"}} 5\n' in text
    assert f'precedent:refused_requests_total{{process="{process}"}} 1\n' in text
    assert prometheus_text(None) == prometheus_text(tmp_path / "none") == ""
