"""Models by the names that other programs know them by: Ollama's store and LM Studio's folders."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_line import precedent
from helpers.model_stores import LAYER, OllamaStore, lm_studio

from precedent import ChatPrecedent
from precedent.config import SamplingParams
from precedent.errors import ModelLoadError, PrecedentError, PromptError, UnsupportedError
from precedent.target.load.loading import load_target, load_tokenizer
from precedent.target.load.source import find_source
from precedent_testing.tiny_gguf import write_gguf
from precedent_testing.tiny_models import byte_tokenizer, tiny_causal_lm

LIBRARY = "registry.ollama.ai/library"
TINY = f"{LIBRARY}/tiny/latest"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_causal_lm(dtype=torch.float32, vocab_size=260, max_position_embeddings=512)
    return write_gguf(tmp_path_factory.mktemp("files") / "tiny.gguf", model, byte_tokenizer((("t", "h"),)))


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> OllamaStore:
    """An empty store of Ollama's, the only one on this machine, whose home folder is empty too."""
    monkeypatch.setenv("XDG_CACHE_HOME", os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache")))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("OLLAMA_MODELS", f'"{tmp_path / "ollama"}"')
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return OllamaStore(tmp_path / "ollama")


@pytest.fixture
def unloaded() -> Iterator[list[ChatPrecedent]]:
    """Chat models to unload when the test ends."""
    models: list[ChatPrecedent] = []
    yield models
    for model in models:
        model.unload()


NAMES = {
    f"{LIBRARY}/smollm2/latest": ("ollama:smollm2", "ollama:SmolLM2:LATEST", "smollm2:latest", "library/smollm2:latest",
                                  "ollama:registry.ollama.ai/library/smollm2"),
    f"{LIBRARY}/llama3.2/3b": ("llama3.2:3b", "ollama:llama3.2:3b"),
    "registry.ollama.ai/Me/Mine/q4": ("ollama:me/mine:Q4", "Me/Mine:q4"),
    "hf.co/bartowski/Llama-3.2-1B-GGUF/Q4_K_M": ("hf.co/bartowski/Llama-3.2-1B-GGUF:Q4_K_M",
                                                 "ollama:hf.co/Bartowski/llama-3.2-1b-gguf:q4_k_m"),
    "localhost:5000/team/model/latest": ("ollama:localhost:5000/team/model",),
    "ollama.com/library/newer/latest": ("ollama:newer",),
}  # fmt: skip


@pytest.mark.parametrize("manifests", ["manifests", "manifests-v2"])
@pytest.mark.parametrize(("place", "name"), [(place, name) for place, names in NAMES.items() for name in names])
def test_ollamas_names_mean_what_they_mean_to_ollama(
    place: str, name: str, manifests: str, store: OllamaStore, file: Path
) -> None:
    store.add(place, file, manifests=manifests, license="MIT", template="{{ .Prompt }}")
    assert find_source(name).file.samefile(file)


def test_a_manifest_that_lists_several_means_the_one_with_a_gguf_file(store: OllamaStore, file: Path) -> None:
    """Beside it may be one for another runner. Blobs from before Ollama 0.1.32 have a colon in their names."""
    whole = json.loads(store.add(f"{LIBRARY}/one/latest", file).read_text())
    mlx = {"runner": "mlx", "layers": [{"mediaType": f"{LAYER}tensor", "digest": "sha256:00"}]}
    kept = {"runner": "ollama", "digest": store.blob(json.dumps(whole).encode())["digest"]}
    listing = "application/vnd.ollama.manifest.list.v2+json"
    for blob in sorted((store.folder / "blobs").iterdir()):
        blob.rename(blob.with_name(blob.name.replace("-", ":")))
    for tag, ours in (("inside", {"runner": "llamacpp", **whole}), ("beside", kept)):
        store.write(f"{LIBRARY}/one/{tag}", {"mediaType": listing, "manifests": [mlx, ours]})
        assert find_source(f"one:{tag}").file.samefile(file)
    store.write(f"{LIBRARY}/one/other", {"mediaType": listing, "manifests": [mlx]})
    with pytest.raises(UnsupportedError, match="pull another tag"):
        find_source("one:other")


Damage = Callable[[OllamaStore, Path], object]


def changed(**layer: Any) -> Damage:
    """Write a model whose first layer has other entries."""

    def damage(store: OllamaStore, file: Path) -> None:
        manifest = json.loads(store.add(TINY, file).read_text())
        manifest["layers"][0] |= layer
        store.write(TINY, manifest)

    return damage


def emptied(store: OllamaStore, file: Path) -> None:
    store.add(TINY, file)
    for blob in (store.folder / "blobs").iterdir():
        blob.unlink()


def shortened(store: OllamaStore, file: Path) -> None:
    """As a pull that was cut off leaves a layer."""
    store.add(TINY, file.read_bytes())
    (blob,) = (store.folder / "blobs").iterdir()
    blob.write_bytes(file.read_bytes()[:100])


def given(**layers: Any) -> Damage:
    return lambda store, file: store.add(TINY, file, **layers)


def beside(kind: str, content: bytes) -> Damage:
    """Write a model with a further layer."""

    def damage(store: OllamaStore, file: Path) -> None:
        layers = json.loads(store.add(TINY, file).read_text())["layers"]
        store.write(TINY, {"layers": [*layers, {"mediaType": f"{LAYER}{kind}", **store.blob(content)}]})

    return damage


def written(manifest: object) -> Damage:
    return lambda store, file: store.write(TINY, manifest)


BAD = {
    "no JSON": (written("{"), "is not a JSON object: run `ollama pull tiny` again"),
    "a list": (written([]), "is not a JSON object"),
    "no layers": (written({"layers": 3}), "lists no layers: run `ollama pull tiny` again"),
    "layers that are texts": (written({"layers": ["a"]}), "lists no layers"),
    "of a server": (written({"layers": []}), "has no weights here (it runs on Ollama's servers)"),
    "digest with a path": (changed(digest="sha256:../../../../etc/passwd"), "which is not a digest: run `ollama pull"),
    "digest that is short": (changed(digest="sha256-abc"), "which is not a digest"),
    "digest with a line break": (changed(digest=f"sha256:{'a' * 64}\n"), "which is not a digest"),
    "digest of another kind": (changed(digest=f"md5:{'a' * 64}"), "which is not a digest"),
    "digest that is a number": (changed(digest=7), "names a layer 7, which is not a digest"),
    "missing blob": (emptied, "is missing,"),
    "truncated blob": (shortened, "has 100 bytes of"),
    "weights of another format": (lambda store, file: store.add(TINY, b"PK\3\4"), "are not a GGUF file: run `ollama"),
    "adapter": (given(adapter="x"), "comes with an adapter"),
    "projector": (given(projector="x"), "comes with a projector for images; for texts alone give the file"),
    "messages": (given(messages="[]"), "comes with messages that begin every conversation"),
    "tensor": (given(tensor="x"), "tensors that are not in a GGUF file"),
    "unknown layer": (given(vision="x"), "has a layer of an unknown kind, 'vision'"),
    "two files": (lambda store, file: beside("model", file.read_bytes())(store, file), "is split over 2 files"),
    "parameters that are no object": (beside("params", b"[1]"), "is not a JSON object"),
    "text that is not UTF-8": (beside("system", b"\xff"), "cannot read"),
    "a text without end": (beside("system", bytes(5 << 20)), "larger than 4,194,304 bytes"),
    "mirostat": (given(params={"mirostat": 2}), "sets mirostat to 2, which is not supported: give its file"),
    "a number that is a text": (given(params={"temperature": "hot"}), "temperature='hot' must be"),
    "a temperature below 0": (given(params={"temperature": -1}), "temperature=-1 must be"),
}  # fmt: skip


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_model_in_the_store_is_named_with_what_to_do(kind: str, store: OllamaStore, file: Path) -> None:
    """By every way to load one, in one line."""
    damage, says = BAD[kind]
    damage(store, file)
    for load in (find_source, load_target, load_tokenizer):
        with pytest.raises(PrecedentError, match=re.escape(says)) as caught:
            load("ollama:tiny")
        assert "\n" not in str(caught.value)
    assert ChatPrecedent(model="ollama:tiny").profile is None


@pytest.mark.parametrize(
    "name",
    [
        "../../etc/passwd",
        "a/../b:c",
        "/etc/passwd",
        "a/b/c/d:e",
        "",
        ":",
        "a:",
        "a b",
        "a:b\n",
        "a\\b",
        "..",
        "-x",
        "é",
    ],
)
def test_a_name_that_is_no_name_of_ollamas_reads_nothing(name: str, store: OllamaStore) -> None:
    with pytest.raises(ModelLoadError, match="is not a name of Ollama's: write"):
        find_source(f"ollama:{name}")


def test_a_model_that_is_not_there_says_what_to_pull(
    store: OllamaStore, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ModelLoadError, match=r"`ollama pull llama3.2:3b`, or set OLLAMA_MODELS \(looked in .*ollama\)"):
        find_source("llama3.2:3b")
    store.add(f"{LIBRARY}/tiny/latest", file)
    store.add("hf.co/me/mine/latest", file)
    with pytest.raises(ModelLoadError, match=r"`ollama pull gone`; it has hf.co/me/mine:latest, tiny:latest"):
        find_source("ollama:gone")
    with pytest.raises(ModelLoadError, match="'hf:me/other:q8' to download it"):
        find_source("hf.co/me/other:q8")

    def refused(folder: Path) -> Iterator[Path]:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refused)
    with pytest.raises(ModelLoadError, match=r"cannot be read \(Permission denied\): run as a user who may read it"):
        find_source("ollama:tiny")
    with pytest.raises(ModelLoadError, match=r"Permission denied.*: run as a user who may read them"):
        find_source("lmstudio:pub/tiny")


def test_a_name_that_the_hub_does_not_have_but_ollama_does_says_so(store: OllamaStore, file: Path) -> None:
    store.add(TINY, file)
    with pytest.raises(ModelLoadError, match="Ollama has it: write 'ollama:tiny'"):
        load_target("tiny")


def test_without_the_variable_the_usual_folders_are_looked_into(
    store: OllamaStore, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OLLAMA_MODELS")
    OllamaStore(tmp_path / "home" / ".ollama" / "models").add(TINY, file)
    assert find_source("tiny:latest").file.samefile(file)
    with pytest.raises(ModelLoadError, match="it has tiny:latest"):
        find_source("gone:latest")


PARAMS = {
    "temperature": 0.7, "top_k": 30, "min_p": 0.01, "repeat_penalty": 1.1, "presence_penalty": 0.5, "seed": 11,
    "num_predict": 12, "stop": ["<|endoftext|>", "zz"], "num_ctx": 4096, "num_gpu": 1, "mirostat": 0, "top_p": None,
}  # fmt: skip
MEANT: dict[str, Any] = {
    "temperature": 0.7, "top_k": 30, "min_p": 0.01, "repetition_penalty": 1.1, "presence_penalty": 0.5, "seed": 11,
    "max_tokens": 12, "stop": ["zz"],
}  # fmt: skip


def test_parameters_and_system_message_are_the_defaults_of_that_name(
    store: OllamaStore, file: Path, unloaded: list[ChatPrecedent], caplog: pytest.LogCaptureFixture
) -> None:
    """Each against the file itself with the same settings; what the caller gives goes first."""
    store.add(TINY, file, params=PARAMS, system="Say <|im_end|> little.")

    def answer(model: object, messages: list[tuple[str, str]], **fields: Any) -> str:
        unloaded.append(ChatPrecedent(model=str(model), **fields))
        return unloaded[-1].invoke(messages).text

    hello, system = [("user", "hello")], ("system", "Say <|im_end|> little.")
    caplog.set_level(logging.INFO, "precedent.target.load")
    said = answer("ollama:tiny", hello)
    assert "temperature 0.7" in caplog.messages[1], "after the warning about the penalty"
    assert said == answer(file, [system, *hello], **MEANT) != answer(file, hello, **MEANT)
    own = [("system", "Mine."), *hello]
    assert answer("ollama:tiny", own) == answer(file, own, **MEANT) != said
    plain = {"max_tokens": 12}
    assert answer("ollama:tiny", own, sampling="precedent", **plain) == answer(file, own, **plain)
    assert answer("ollama:tiny", own, temperature=0, seed=3) == answer(file, own, **MEANT | {"temperature": 0})
    assert unloaded[0].get_num_tokens_from_messages([]) == 0
    engine = unloaded[0].engine
    given = ChatPrecedent.from_model(engine.target.model, engine.tokenizer, model_name="a:b")  # type: ignore[union-attr]
    unloaded.append(given)
    for named in (given, ChatPrecedent.from_engine(engine)):  # a name, but not one that was looked up in a store
        assert named.invoke(own, **plain).text == answer(file, own, **plain)
    assert engine.sampling_defaults == {**MEANT, "stop": ("zz",)}
    (control,) = engine.tokenizer.encode("<|endoftext|>", add_special_tokens=False)
    assert control in engine.target.generation_config.eos_token_id  # type: ignore[union-attr,operator]


@pytest.mark.parametrize(
    ("params", "meant", "warns"),
    [
        ({"stop": ["zz"]}, {"stop": ("zz",)}, None),
        ({"stop": "zz", "num_predict": -1, "seed": -1}, {"stop": ("zz",)}, None),
        ({"top_p": 0.9}, {"top_p": 0.9, "temperature": 0.8}, None),
        ({"top_k": -1, "temperature": 1}, {"top_k": 0, "temperature": 1.0}, None),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}, "counts the whole text"),
        ({"xtc": 1}, {}, "the unknown parameter 'xtc' is not applied"),
    ],
)
def test_parameters_have_ollamas_meaning(
    params: Any, meant: Any, warns: str | None, store: OllamaStore, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from precedent.target.load.loading import sampling_defaults

    store.add(TINY, file, params=params)
    model, _ = load_target("ollama:tiny")
    found = sampling_defaults(model.generation_config)
    assert {name: getattr(SamplingParams(**found), name) for name in found} == meant
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == (warns is not None)
    assert warns is None or warns in warnings[0]


def test_a_file_whose_only_template_is_ollamas_refuses_conversations_until_it_gets_one(
    store: OllamaStore, tmp_path: Path, unloaded: list[ChatPrecedent], capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_tokenizer((("t", "h"),))
    tokenizer.chat_template = None
    model = tiny_causal_lm(dtype=torch.float32, vocab_size=260, max_position_embeddings=512)
    bare = write_gguf(tmp_path / "bare.gguf", model, tokenizer)
    store.add(TINY, bare, template="<|start_header_id|>user<|end_header_id|>{{ .Prompt }}")
    unloaded.append(ChatPrecedent(model="tiny:latest", max_tokens=4))
    for ask in (unloaded[0].invoke, unloaded[0].bind_tools([{"name": "f", "description": "F."}]).invoke):
        with pytest.raises((PromptError, UnsupportedError), match="chat_template="):
            ask("hello")
    with pytest.raises(PromptError, match=r"only a Go template.*'llama-3' has its tokens"):
        unloaded[0].invoke("hello")
    unloaded.append(ChatPrecedent(model="tiny:latest", max_tokens=4, chat_template="chatml"))
    assert unloaded[1].invoke("hello").usage_metadata["output_tokens"] == 4  # type: ignore[index]
    assert precedent("doctor", "tiny:latest") == 1
    assert "Go template, which is not read" in " ".join(capsys.readouterr().out.split())
    assert precedent("doctor", "tiny:latest", "--chat-template", "chatml") == 0


def test_doctor_says_what_the_store_keeps_and_that_it_is_the_default(
    store: OllamaStore, file: Path, tmp_path: Path
) -> None:
    store.add(TINY, file, params={"temperature": 0.7, "odd": 1}, system="Be brief.", template="{{ .Prompt }}")
    report = tmp_path / "report.json"
    assert precedent("doctor", "ollama:tiny", "--json", report) == 0
    said = [(one["check"], one["finding"]) for one in json.loads(report.read_text())["findings"]]
    by_check = dict(said)
    assert "temperature 0.7; applied under this name, unless sampling='precedent'" in by_check["sampling"]
    assert "get 'Be brief.'" in by_check["system"]
    assert by_check["chat template"] == "the model's own"
    kept = " ".join(finding for check, finding in said if check == "store")
    for part in ("sha256-", "its Go template is not read", "'odd' is not applied"):
        assert part in kept


def test_an_embedding_model_is_refused_as_one(store: OllamaStore, tmp_path: Path) -> None:
    model = tiny_causal_lm(dtype=torch.float32, vocab_size=260)
    embedder = write_gguf(tmp_path / "e.gguf", model, byte_tokenizer((("t", "h"),)), llama__pooling_type=1)
    store.add(f"{LIBRARY}/embedder/latest", embedder)
    with pytest.raises(UnsupportedError, match="is an embedding model"):
        load_target("ollama:embedder")


def test_run_takes_a_models_name_before_the_question_as_ollama_does(
    store: OllamaStore, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add(TINY, file, params={"temperature": 0.7, "seed": 5, "num_predict": 6})
    report, texts = tmp_path / "report.json", []
    for arguments in (
        ("ollama:tiny", "hello"),
        ("hello", "--target", "tiny:latest"),
        ("hello", "--target", file, "--temperature", 0.7, "--seed", 5, "--max-tokens", 6),
    ):
        assert precedent("run", *arguments, "--json", report) == 0
        texts.append(json.loads(report.read_text())["text"])
    assert texts[0] == texts[1] == texts[2]
    capsys.readouterr()
    for arguments in (("ollama:tiny",), ("ollama:tiny", "hello", "--target", file)):
        assert precedent("run", *arguments) == 2
        assert "give the question after the model's name" in " ".join(capsys.readouterr().err.split())


STUDIO = ("Pub/One-GGUF/one-q4_0.gguf", "Pub/One-GGUF/mmproj-one.gguf", "Pub/Two/a.gguf", "Pub/Two/b.gguf",
          "Pub/Split/s-00001-of-00002.gguf", "Pub/Split/s-00002-of-00002.gguf")  # fmt: skip


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Pub/One-GGUF", STUDIO[0]),
        ("pub/one-gguf", STUDIO[0]),
        ("pub/one-gguf/ONE-Q4_0.gguf", STUDIO[0]),
        ("Pub/Two/b.gguf", STUDIO[3]),
        ("pub/two/B", STUDIO[3]),
        ("Pub/Split", STUDIO[4]),
    ],
)
def test_lm_studios_names_mean_its_files(name: str, meant: str, store: OllamaStore, file: Path, tmp_path: Path) -> None:
    folder = lm_studio(tmp_path / "home", *STUDIO, model=file)
    assert find_source(f"lmstudio:{name}").file == folder / meant


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Pub/Two", "write lmstudio:Pub/Two/FILE, of a.gguf, b.gguf"),
        ("Pub/MLX", "holds no GGUF file"),
        ("Pub/Gone", "LM Studio has no model 'Pub/Gone' here"),
        ("Pub/Two/c.gguf", "it has Pub/One-GGUF/one-q4_0.gguf, Pub/Split/s-00001-of-00002.gguf"),
        ("one", "is not a name of LM Studio's"),
        ("../x", "is not a name of LM Studio's"),
        ("Pub/../x", "is not a name of LM Studio's"),
        ("a/b/c/d", "is not a name of LM Studio's"),
        ("", "is not a name of LM Studio's"),
    ],
)
def test_a_name_that_lm_studio_cannot_mean_is_refused(
    name: str, says: str, store: OllamaStore, file: Path, tmp_path: Path
) -> None:
    (lm_studio(tmp_path / "home", *STUDIO, model=file) / "Pub/MLX").mkdir()
    with pytest.raises(ModelLoadError, match=re.escape(says)):
        find_source(f"lmstudio:{name}")


@pytest.mark.parametrize("where", ["pointer", "settings", "older"])
def test_lm_studios_folder_is_where_it_says(where: str, store: OllamaStore, file: Path, tmp_path: Path) -> None:
    """Its home may be elsewhere, and its models beside it; Windows' editors write a mark before the first letter."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    models = {"pointer": elsewhere / "models", "settings": elsewhere, "older": home / ".cache/lm-studio/models"}[where]
    (models / "pub/one").mkdir(parents=True)
    (models / "pub/one/one.gguf").symlink_to(file)
    (home / ".lmstudio").mkdir(parents=True)
    if where == "pointer":
        (home / ".lmstudio-home-pointer").write_text(f"{elsewhere}\n")
    if where == "settings":
        settings = json.dumps({"downloadsFolder": str(elsewhere)})
        (home / ".lmstudio/settings.json").write_text(settings, encoding="utf-8-sig")
    assert find_source("lmstudio:pub/one").file.samefile(file)


def test_what_a_header_recommends_is_the_default_under_lm_studios_names(
    store: OllamaStore, tmp_path: Path, unloaded: list[ChatPrecedent]
) -> None:
    model = tiny_causal_lm(dtype=torch.float32, vocab_size=260, max_position_embeddings=512)
    file = write_gguf(tmp_path / "t.gguf", model, byte_tokenizer((("t", "h"),)), general__sampling__temp=2.0)
    lm_studio(tmp_path / "home", "pub/tiny/t.gguf", model=file)
    texts = []
    for name, fields in (("lmstudio:pub/tiny", {}), (str(file), {"temperature": 2.0}), (str(file), {})):
        unloaded.append(ChatPrecedent(model=name, max_tokens=8, seed=3, **fields))
        texts.append(unloaded[-1].invoke("hello").text)
    assert texts[0] == texts[1] != texts[2]
