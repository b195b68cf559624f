"""A package that is uninstalled or upgraded leaves the cache as it is: what fits is read, the rest refused by name."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from helpers.cache_commands import run, run_json

from precedent import ChatPrecedent, SpeculationCache, SpeculationConfig
from precedent.cache import Completion, verify_cache
from precedent.cache.exports import import_cache, read_export
from precedent.cache.records import ACTIONS
from precedent.cache.store import open_store
from precedent.drafters import check_known
from precedent.errors import CacheMismatchError, ConfigError
from precedent_testing.embedders import HashEmbedder
from precedent_testing.scripted_model import scripted_model_engine

MODULE = """
from precedent.cache import SQLiteStore
from precedent.drafters import Candidates


class Echo:
    name = "echo"

    def begin(self, request):
        return self

    def match(self, budget):
        return Candidates.of("echo", [(5, -1, 0.5, 0)][:budget])

    def committed(self, token_ids):
        pass

    end = close = lambda self: None


def echo(parts):
    return Echo()


def open_shelf(url, **settings):
    return SQLiteStore.open(url.reveal().removeprefix("shelf://"), **settings)
"""

ENTRY_POINTS = "[precedent.drafters]\necho = shelf_plugin:echo\n[precedent.stores]\nshelf = shelf_plugin:open_shelf\n"


@dataclass
class Package:
    """Another package, whose drafter is `echo` and whose stores are at `shelf://`."""

    folder: Path

    def install(self, version: str) -> None:
        self.uninstall()
        written = self.folder / f"shelf_plugin-{version}.dist-info"
        written.mkdir(parents=True)
        (self.folder / "shelf_plugin.py").write_text(MODULE)
        (written / "METADATA").write_text(f"Metadata-Version: 2.1\nName: shelf-plugin\nVersion: {version}\n")
        (written / "entry_points.txt").write_text(ENTRY_POINTS)

    def uninstall(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Package:
    monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
    package = Package(tmp_path / "site-packages")
    package.install("1.0")
    return package


@contextmanager
def cache_in(folder: Path) -> Iterator[SpeculationCache]:
    with SpeculationCache.open(folder, embedder=HashEmbedder()) as cache:
        yield cache


def answered(cache: SpeculationCache, *drafters: str) -> dict[str, int]:
    """Ask a question; returns the accepted tokens by drafter."""
    speculation = SpeculationConfig(drafters=drafters)
    with closing(scripted_model_engine(["It is on its way."], cache=cache, speculation=speculation)) as engine:
        answer = ChatPrecedent.from_engine(engine).invoke("Where is order 1042?")
    assert answer.text == "It is on its way."
    accepted: dict[str, int] = answer.response_metadata["speculation"]["accepted_by_source"]
    return accepted


def test_completions_are_proposed_without_the_drafter_that_was_there(package: Package, tmp_path: Path) -> None:
    """Beside them lie actions of precedent-run-ahead, which only that package reads."""
    actions = Completion((1, 2), ACTIONS, "", query="Where is order 1042?", workflow_step="actions", text="look_up")
    with cache_in(tmp_path / "cache") as cache:
        assert "recall" not in answered(cache, "recall", "echo")
        cache.insert(actions)
    package.uninstall()
    with pytest.raises(ConfigError, match="no drafter is called 'echo'"):
        check_known(["echo"])
    with cache_in(tmp_path / "cache") as cache:
        assert answered(cache, "recall")["recall"] > 3
        assert {one.text for one in cache.list()} == {"It is on its way.", "look_up"}
    assert verify_cache(tmp_path / "cache").sound


def test_a_store_of_a_package_is_refused_by_name_without_it_and_whole_with_its_next_version(
    package: Package, tmp_path: Path
) -> None:
    place = f"shelf://{tmp_path / 'shelf'}"
    with closing(open_store(place)) as store:
        store.insert(Completion((1, 2), "tokenizer", "model", query="where?"), None, None)
        (held,) = store.since("default", "tokenizer", 0)
    package.uninstall()
    told = run("stats", place)
    assert (told.exit_code, "no installed package opens a cache at shelf://" in told.stderr) == (2, True)
    package.install("2.0")
    with closing(open_store(place, create=False)) as store:
        assert store.since("default", "tokenizer", 0) == [held]


def test_an_embedder_of_another_version_is_refused_and_completions_are_read_without_one(tmp_path: Path) -> None:
    """An export brings them to the new embedder; nothing is lost for the old one."""
    folder, old, new = tmp_path / "cache", HashEmbedder(salt="1.0"), HashEmbedder(salt="2.0")
    with SpeculationCache.open(folder, embedder=old) as cache:
        cache.insert(Completion((1, 2), "tokenizer", "model", query="where is it?", text="on its way"))
    with pytest.raises(CacheMismatchError, match=r"was filled with the embedder .* it is left untouched"):
        SpeculationCache.open(folder, embedder=new)
    assert [one["text"] for one in run_json(tmp_path, "list", folder)["completions"]] == ["on its way"]
    assert run_json(tmp_path, "export", folder, tmp_path / "out")["exported"] == 1
    with closing(open_store(tmp_path / "new")) as store:
        import_cache(read_export(tmp_path / "out"), store, embedder=new)
    for place, embedder in ((tmp_path / "new", new), (folder, old)):
        with SpeculationCache.open(place, embedder=embedder) as cache:
            (hit,) = cache.recall("where is it?", tenant="default", tokenizer="tokenizer")
            assert hit.similarity > 0.99
