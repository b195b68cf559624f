"""Names that are no model's: the advice comes at once, and the hub is asked no more than once."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from precedent.errors import ModelLoadError
from precedent.langchain.profile import profile_of_files
from precedent.target.load.loading import load_config, load_target, load_tokenizer
from precedent.target.load.source import DEMO_TARGET, check_name, find_source
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

HTTP: Any = importlib.import_module(type(huggingface_hub.get_session()).__module__.split(".")[0])
"""The HTTP library that the hub's library uses, whichever it is."""

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("llama3.2:3b", "`ollama pull llama3.2:3b`"),
        ("library/qwen3:0.6b", "`ollama pull library/qwen3:0.6b`"),
        ("hf.co/bartowski/Llama-3.2-1B-GGUF:Q4_K_M", "write 'hf:bartowski/Llama-3.2-1B-GGUF:Q4_K_M'"),
        ("bartowski/Llama-3.2-1B-GGUF:Q4_K_M", "write 'hf:bartowski/Llama-3.2-1B-GGUF:Q4_K_M'"),
        ("ollama:llama3.2", "`ollama pull llama3.2`"),
        ("lmstudio:somebody/something", "LM Studio has no model 'somebody/something' here"),
        ("gpt-4o", "only through its provider's API"),
        ("GPT-4o-mini", "only through its provider's API"),
        ("o3-mini", "only through its provider's API"),
        ("claude-sonnet-4-5", "only through its provider's API"),
        ("gemini-2.5-pro", "only through its provider's API"),
        ("openai:gpt-4o", "only through its provider's API"),
        ("anthropic:claude-opus-4", "only through its provider's API"),
        ("huggingface:Qwen/Qwen3-8B", "write 'Qwen/Qwen3-8B'"),
        ("https://huggingface.co/Qwen/Qwen3-8B", "is an address"),
        ("https://huggingface.co/me/mine-GGUF/resolve/main/mine.gguf", "hf:OWNER/NAME:QUANT"),
        ("file:///models/mine.gguf", "or a path"),
        ("hf.co/me/mine-GGUF", "is an address"),
        ("models/mine.GGUF", "there is no file"),
        ("x" * 5000, "File name too long"),
        ("smollm2-135m-order-desk", "from precedent_demo import adapted_target"),
    ],
)
def test_what_was_meant_is_said_without_asking_anybody(name: str, says: str, requests: list[str]) -> None:
    for load in (load_target, load_config, load_tokenizer):
        with pytest.raises(ModelLoadError, match=re.escape(says)) as caught:
            load(name)
        assert "\n" not in str(caught.value)
    assert requests == []


HUB_IDS = [
    "Qwen/Qwen3-0.6B", "openai/gpt-oss-20b", "gpt2", "gpt2-medium", "openai-gpt", "bert-base-uncased", "t5-small",
    DEMO_TARGET,
]  # fmt: skip


@given(st.sampled_from(HUB_IDS) | st.from_regex(r"[A-Za-z0-9][\w.-]{0,20}/[A-Za-z0-9][\w.-]{0,30}", fullmatch=True))
def test_ids_of_the_hub_and_whatever_has_an_owner_pass(name: str) -> None:
    check_name(name)


def saved_tiny(folder: Path) -> None:
    tiny_causal_lm(dtype=torch.float32).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)


def test_a_folder_of_that_name_is_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved_tiny(tmp_path / "gpt-4o")
    monkeypatch.chdir(tmp_path)
    assert load_target("gpt-4o")[0].dtype == torch.float32


class Hub:
    """Stands at the other end of every request: counts them, and answers or fails."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answer: Any = HTTP.ConnectError("[Errno -2] Name or service not known")

    def __call__(self, request: Any) -> Any:
        if not request.url.path.startswith("/api/agent"):  # the library's own question, about its own surroundings
            self.asked.append(f"{request.method} {request.url.path}")
        if isinstance(self.answer, Exception):
            raise self.answer
        return HTTP.Response(self.answer, request=request)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """No hub within reach, and nothing fetched before; what waits between two tries does so no longer."""
    from huggingface_hub import constants
    from huggingface_hub.utils import _http

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "ollama"))
    monkeypatch.setattr(_http.time, "sleep", lambda seconds: None)
    hub = Hub()
    huggingface_hub.set_client_factory(lambda: HTTP.Client(transport=HTTP.MockTransport(hub)))
    yield hub
    huggingface_hub.set_client_factory(_http.default_client_factory)


@pytest.fixture
def requests(hub: Hub) -> list[str]:
    return hub.asked


@pytest.mark.parametrize("load", [load_target, load_config, load_tokenizer])
def test_without_a_network_the_hub_is_asked_once(load: Any, hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match=r"cannot be asked \(\[Errno -2\] Name or service not known\)") as caught:
        load("nobody/nothing")
    assert hub.asked == ["HEAD /nobody/nothing/resolve/main/config.json"]
    assert "hf download nobody/nothing" in str(caught.value)


def test_a_hub_that_answers_is_asked_by_transformers_as_ever(hub: Hub) -> None:
    """A no is an answer: whatever transformers makes of it is said."""
    hub.answer = 404
    with pytest.raises(ModelLoadError, match="the Hugging Face hub did not give it"):
        load_target("nobody/nothing")
    assert len(hub.asked) > 1


def test_a_caller_who_wants_local_files_alone_asks_nobody(hub: Hub) -> None:
    with pytest.raises(ModelLoadError, match="local_files_only is given"):
        load_target("nobody/nothing", model_kwargs={"local_files_only": True})
    assert hub.asked == []


def fetched_before(repo: Path) -> Path:
    """The folder of the snapshot that a repository's `main` names."""
    (repo / "refs").mkdir(parents=True)
    (repo / "refs" / "main").write_text(COMMIT)
    (repo / "snapshots" / COMMIT).mkdir(parents=True)
    return repo / "snapshots" / COMMIT


def test_what_was_fetched_before_is_loaded_without_a_network(hub: Hub, tmp_path: Path) -> None:
    saved_tiny(fetched_before(tmp_path / "hub" / "models--somebody--something"))
    model, tokenizer = load_target("somebody/something")
    assert model.dtype == torch.float32
    assert tokenizer.decode(tokenizer("order 66").input_ids) == "order 66"
    assert len(hub.asked) == 1


class RepositoryHub(Hub):
    """A hub with one repository, which holds the files of a folder."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__()
        self.name = name
        self.files = {
            file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()
        }

    def __call__(self, request: Any) -> Any:
        path = request.url.path.removeprefix("/api/models")
        self.asked.append(f"{request.method} {path}")
        if not path.startswith(f"/{self.name}"):
            return HTTP.Response(404, headers={"X-Error-Code": "RepoNotFound"}, request=request)
        name = path.partition("/resolve/main/")[2] or path.partition(f"/resolve/{COMMIT}/")[2]
        if "/tree/" in path:
            listed = [{"type": "file", "path": name, "size": len(of), "oid": name} for name, of in self.files.items()]
            return HTTP.Response(200, json=listed, request=request)
        if not name:
            siblings = [{"rfilename": file} for file in self.files]
            said = {"id": self.name, "sha": COMMIT, "siblings": siblings, "private": False}
            return HTTP.Response(200, json=said, request=request)
        if name not in self.files:
            headers = {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT}
            return HTTP.Response(404, headers=headers, request=request)
        headers = {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT, "Content-Length": str(len(self.files[name]))}
        content = None if request.method == "HEAD" else self.files[name]
        return HTTP.Response(200, headers=headers, content=content, request=request)


def answered_by(hub: Hub) -> None:
    huggingface_hub.set_client_factory(lambda: HTTP.Client(transport=HTTP.MockTransport(hub)))


@pytest.mark.parametrize("kwargs", [{}, {"revision": "main"}])
def test_an_adapter_is_loaded_by_its_id_from_the_hub_and_then_without_it(
    kwargs: dict[str, Any], hub: Hub, adapter: Path
) -> None:
    here, ids = load_target(adapter)[0], torch.tensor([[1, 2, 3]])
    answered_by(RepositoryHub("somebody/an-adapter", adapter))
    fetched, tokenizer = load_target("somebody/an-adapter", model_kwargs=kwargs)
    assert load_config("somebody/an-adapter").vocab_size == here.config.vocab_size
    answered_by(hub)
    again, _ = load_target("somebody/an-adapter", model_kwargs=kwargs)
    for model in (fetched, again):
        torch.testing.assert_close(model(ids).logits, here(ids).logits)
    assert tokenizer("hi").input_ids == byte_tokenizer()("hi").input_ids


FILES = (
    "BF16/m-BF16-00001-of-00002.gguf", "BF16/m-BF16-00002-of-00002.gguf", "README.md", "imatrix.gguf", "m-IQ4_XS.gguf",
    "m-Q4_K_M.gguf", "m-Q8_0.gguf", "m.q5_k_m.gguf", "mmproj-Q4_K_M.gguf", "mtp-m-Q4_K_M.gguf",
)  # fmt: skip
"""A repository of GGUF files, in the hub's order."""

MEANT = {
    "Some/Thing-GGUF": "m-Q4_K_M.gguf", "Some/Thing-GGUF:q8_0": "m-Q8_0.gguf",
    "Some/Thing-GGUF:Q5_K_M": "m.q5_k_m.gguf", "Some/Thing-GGUF:bf16": FILES[0],
    "Some/Thing-GGUF:iq4_xs": "m-IQ4_XS.gguf",
}  # fmt: skip


def repository(folder: Path, *files: str) -> Path:
    """A folder of files that begin as GGUF files do, and hold their names."""
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(b"GGUF" + file.encode())
    return folder


@pytest.mark.parametrize("name", MEANT)
def test_a_gguf_file_on_the_hub_is_chosen_as_llama_cpp_does_fetched_once_and_then_found_without_the_hub(
    name: str, hub: Hub, tmp_path: Path
) -> None:
    """With all parts, and nothing else."""
    answered_by(RepositoryHub("Some/Thing-GGUF", repository(tmp_path / "there", *FILES)))
    found = find_source(f"hf:{name}").file
    assert isinstance(found, Path)
    assert found.read_bytes() == b"GGUF" + MEANT[name].encode()
    parts = 2 if MEANT[name] == FILES[0] else 1
    assert len([*(tmp_path / "hub").rglob("snapshots/**/*.gguf")]) == parts
    answered_by(hub)
    assert find_source(f"hf:{name.replace('Some/Thing', 'some/thing')}").file == found
    assert hub.asked == []
    with pytest.raises(ModelLoadError, match=rf"on this machine \(others: {MEANT[name]}\), and the Hugging Face hub"):
        find_source("hf:Some/Thing-GGUF:Q2_K")


@pytest.mark.parametrize(
    ("files", "quant", "meant"),
    [
        (("a-Q8_0.gguf", "a-Q6_K.gguf"), "", "a-Q8_0.gguf"),
        (("mmproj-a.gguf", "a-Q6_K.gguf", "a-Q3_K.gguf"), "", "a-Q6_K.gguf"),
        (("a-BF16.gguf", "a-F16.gguf"), "f16", "a-F16.gguf"),
        (("a-IQ4_XS.gguf", "a-Q4_XS.gguf"), "q4_xs", "a-Q4_XS.gguf"),
        (("a-UD-Q4_K_XL.gguf", "a-Q4_K_M.gguf"), "Q4_K_XL", "a-UD-Q4_K_XL.gguf"),
        (("Q4_K_M/a-00001-of-00001.gguf",), "", None),
    ],
)
def test_of_several_files_the_quantisation_decides(
    files: tuple[str, ...], quant: str, meant: str | None, hub: Hub, tmp_path: Path
) -> None:
    answered_by(RepositoryHub("some/thing", repository(tmp_path / "there", *files)))
    found = find_source(f"hf:some/thing:{quant}" if quant else "hf:some/thing").file
    assert isinstance(found, Path)
    assert found.name == Path(meant or files[0]).name


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("some/thing:Q2_K", "has no file of Q2_K; it has a-Q4_K_M.gguf"),
        ("some/other", "the hub did not give the files of some/other"),
        ("thing", "is not a name on the hub"),
        ("a/b/c", "is not a name on the hub"),
        ("../x:Q4_K_M", "is not a name on the hub"),
        ("a/b:../x", "is not a name on the hub"),
        ("", "is not a name on the hub"),
    ],
)
def test_a_name_that_the_hub_cannot_mean_is_refused(name: str, says: str, hub: Hub, tmp_path: Path) -> None:
    answered_by(RepositoryHub("some/thing", repository(tmp_path / "there", "a-Q4_K_M.gguf", "mmproj-a.gguf")))
    with pytest.raises(ModelLoadError, match=re.escape(says)):
        find_source(f"hf:{name}")


def test_a_repository_without_gguf_files_is_named(hub: Hub, tmp_path: Path) -> None:
    answered_by(RepositoryHub("some/thing", repository(tmp_path / "there", "model.safetensors")))
    with pytest.raises(ModelLoadError, match="no GGUF file: give its id, without hf:"):
        find_source("hf:some/thing")


def test_a_file_that_is_not_here_and_cannot_be_fetched_says_how_to_fetch_it(hub: Hub) -> None:
    """One question; none at all where the caller wants none, as a profile does."""
    with pytest.raises(ModelLoadError, match=r"hf download some/thing --include '\*Q8_0\*.gguf'"):
        find_source("hf:some/thing:Q8_0")
    assert len(hub.asked) == 1
    with pytest.raises(ModelLoadError, match="local_files_only is given"):
        find_source("hf:some/thing", {"local_files_only": True})
    assert profile_of_files("hf:some/thing") is None
    assert len(hub.asked) == 1


def test_a_download_that_lacks_a_part_is_completed(hub: Hub, tmp_path: Path) -> None:
    there = RepositoryHub("some/thing", repository(tmp_path / "there", *FILES[:2]))
    answered_by(there)
    first = find_source("hf:some/thing:bf16").file
    assert isinstance(first, Path)
    first.with_name("m-BF16-00002-of-00002.gguf").unlink()
    assert find_source("hf:some/thing:bf16").file == first
    assert first.with_name("m-BF16-00002-of-00002.gguf").is_file()


def test_the_arguments_that_choose_a_file_on_the_hub_reach_it(hub: Hub, tmp_path: Path) -> None:
    from precedent_testing.tiny_gguf import write_gguf

    model, tokenizer = tiny_causal_lm(dtype=torch.float32, vocab_size=260), byte_tokenizer((("t", "h"),))
    (tmp_path / "there").mkdir()
    write_gguf(tmp_path / "there" / "t-Q8_0.gguf", model, tokenizer)
    answered_by(RepositoryHub("some/thing", tmp_path / "there"))
    kwargs = {"revision": "main", "cache_dir": str(tmp_path / "mine")}
    loaded, _ = load_target("hf:some/thing", model_kwargs=kwargs)
    torch.testing.assert_close(loaded(torch.tensor([[1, 2, 3]])).logits, model(torch.tensor([[1, 2, 3]])).logits)
    assert not (tmp_path / "hub").exists()
