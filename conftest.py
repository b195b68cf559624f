"""What holds for every test: no network, no machine's own settings, the same numbers every time."""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from pytest_socket import disable_socket

from precedent.runtime.background import AtOnce
from precedent_testing.pytest_plugin import assert_lossless, precedent_engine

if TYPE_CHECKING:
    from helpers.golden import Golden

__all__ = ["assert_lossless", "precedent_engine"]  # fixtures, whether or not the installed package announces them

CACHE = Path(__file__).parent / ".pytest_cache"

if sys.dont_write_bytecode:  # torch and transformers take 11 s to import uncompiled, 4 s compiled, in many processes
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(CACHE / "bytecode")
    os.environ |= {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": sys.pycache_prefix}

if "PYTEST_XDIST_WORKER" not in os.environ and not any("gpu" in argument for argument in sys.argv):
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all but the tests of GPUs find the same machine everywhere
os.environ["HF_HUB_OFFLINE"] = "1"  # a hub that is asked by mistake answers at once instead of retrying
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["LANGSMITH_TRACING"] = "false"
if not torch.cuda.is_available():  # where there is triton, its kernels run interpreted; it asks when it is imported,
    # which the package's own modules do by way of transformers: so none of them is imported above
    os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # tiny models are slower on several threads, most of all on a busy machine

os.environ.setdefault("NUMBA_BOUNDSCHECK", "1")  # compiled loops check their indices here, at some cost
os.environ.setdefault("NUMBA_CACHE_DIR", str(CACHE / "numba"))
logging.getLogger("precedent.runtime.compiled").setLevel(logging.ERROR)  # who compiles first is not what a test asks

gc.disable()  # until all is imported and collected, of which nothing is garbage

pytest.register_assert_rewrite("helpers")  # what fails there says as much as in a test

settings.register_profile("deterministic", deadline=None, derandomize=True, database=None)
settings.load_profile("deterministic")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--golden-write", action="store_true", help="record golden files instead of comparing with them")


FEW_VALUES = 3


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One case in `step` of a test marked `sampled(step)` runs each time, the others with the exhaustive tests.

    Of a parameter with at most `FEW_VALUES` values, such as a mode, a case for each value runs.
    """
    cases: dict[str, list[Any]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") is not None:
            cases[item.nodeid.partition("[")[0]].append(item)
    for same in cases.values():
        step = same[0].get_closest_marker("sampled").args[0]
        values = [{(name, id(value)) for name, value in item.callspec.params.items()} for item in same]
        count = Counter(name for name, _ in set[tuple[str, int]]().union(*values))
        seen = set[tuple[str, int]]()
        for number, item in enumerate(same):
            own = {value for value in values[number] if count[value[0]] <= FEW_VALUES}
            if number % step and own <= seen:
                item.add_marker("exhaustive")
            else:
                seen |= own


def pytest_collection_finish() -> None:
    """Whoever collects garbage later does not look through all that was imported and collected."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 10)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """The process whose workers run the tests compiles the inner loops for them, while they collect."""
    if session.config.pluginmanager.hasplugin("dsession"):
        from precedent.engine.warm_up import compile_inner_loops

        compile_inner_loops()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Block the network; Unix sockets stay, asyncio needs them."""
    disable_socket(allow_unix_socket=True)


MISSING = re.compile(r"No module named '(precedent_\w+)'|pip install 'precedent-llm\[([\w-]+)\]'")
PROJECT = tomllib.loads((Path(__file__).parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """Skip a file that imports one of our packages which is not installed: each is tested without the others too."""
    report = yield
    return _skipped_without_package(report, str(collector.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """Skip a test that fails for want of one of our packages: it was imported, or an error says to install it."""
    report = yield
    return _skipped_without_package(report, str(item.path))


def _skipped_without_package(report: Any, path: str) -> Any:
    said = f"{report.longrepr} {report.capstdout} {report.capstderr}" if report.failed else ""
    for module, extra in MISSING.findall(said):
        wanted = PROJECT["optional-dependencies"].get(extra, ()) if extra else [module.replace("_", "-")]
        names = {re.split(r"[^\w-]", one)[0] for one in wanted}
        lacking = [name for name in names if find_spec(name.replace("-", "_")) is None]
        if any((Path(__file__).parent / "plugins" / name).is_dir() for name in lacking):
            report.outcome, report.longrepr = "skipped", (path, 0, f"Skipped: {min(lacking)} is not installed")
            break
    return report


@pytest.fixture(autouse=True, scope="session")
def _remembered_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What steps of tiny models cost stays out of the user's cache folder, and is measured briefly."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("precedent.planning.costs.START_UP_SECONDS", 0.02)
        folder = tmp_path_factory.mktemp("caches")
        patch.setattr("precedent.engine.warm_up.user_cache_path", lambda name: folder / name)
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    """Compare a value with the golden file of a name, or record it if asked to."""
    from helpers.golden import WRITE, compare, record

    if request.config.getoption(WRITE):
        return record
    command = f".venv/bin/python -m pytest -n0 {request.path.relative_to(request.config.rootpath)} {WRITE}"
    return partial(compare, command=command)


@pytest.fixture
def searches_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding waits for recall's searches: what is drafted does not hang on which thread was faster."""
    monkeypatch.setattr("precedent.engine.engine.Background", lambda *settings: AtOnce())
    if find_spec("precedent_generate") is not None:
        monkeypatch.setattr("precedent_generate.prepared.Background", lambda *settings: AtOnce())


@pytest.fixture(params=["matrix unit", "vector unit"])
def each_unit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of bfloat16 on the processor's matrix unit, where it has one, and as other processors make them."""
    from precedent_cpu import row_products
    from precedent_cpu.tile_products import tiles_at_hand

    if request.param == "vector unit":
        monkeypatch.setattr(row_products, "tiles_at_hand", lambda: False)
    elif not tiles_at_hand():
        pytest.skip("this processor has no matrix unit")
