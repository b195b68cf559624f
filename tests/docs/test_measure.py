"""`make figures` keeps what commands found, with command, date and machine, and measures nothing on a busy machine."""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from pathlib import Path

import pytest

from precedent.runtime.instructions import features_for

ROOT = Path(__file__).parents[2]

sys.path[:0] = [str(ROOT / ".ci"), str(ROOT / "tests" / "benchmarks")]
try:
    cells, commands, measure, measurement = map(
        importlib.import_module, ("figure_cells", "figure_commands", "measure", "measurement")
    )
finally:
    del sys.path[:2]

BENCHMARK = """import json, sys
sys.path.insert(0, {folder!r})
from measurement import Measurement
from pathlib import Path
Measurement().write(Path(sys.argv[sys.argv.index("--json") + 1]), {{"value": 1 / 3}})
"""


@pytest.fixture
def benchmark_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A benchmark that takes no time, named `fake`."""
    script = tmp_path / "bench_fake.py"
    script.write_text(BENCHMARK.format(folder=str(ROOT / "tests" / "benchmarks")))
    here = (sys.prefix, "make check")
    fake = commands.Command(f"{script} --size 3", 0.1, environment=here)
    traces = commands.Command(f"{script} TRACES/tau.jsonl.gz", 0.1, environment=here)
    fails = commands.Command(str(tmp_path / "absent.py"), 0.1, environment=here)
    machines = commands.Command(str(script), 0.1, by_machine=True, environment=here)
    known = {"fake": fake, "with-traces": traces, "rows": machines, "fails": fails}
    monkeypatch.setattr(measure, "COMMANDS", known)
    monkeypatch.setattr(measure, "ROOT", tmp_path)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.1, 0.1, 0.1))
    return script


def test_a_measurement_is_kept_with_command_date_and_machine(
    benchmark_script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    status = measure.main(["fake", "with-traces"])
    found = json.loads((tmp_path / "docs" / "figures" / "fake.json").read_text())
    assert found["source"] == "measured"
    assert found["figures"] == {"value": 0.3333}
    assert found["command"].endswith("bench_fake.py --size 3")
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["machine"] == measurement.machine_of() | {
        "load_before": found["machine"]["load_before"], "load_after": found["machine"]["load_after"]
    }  # fmt: skip
    said = capsys.readouterr().out
    assert "docs/figures/fake.json" in said
    assert "with-traces" in said
    assert "skipped: needs recorded runs: --traces FOLDER" in said
    assert "no page shows docs/figures/fake" in said
    assert status == 1


def test_a_command_that_fails_is_named_and_the_others_are_measured(
    benchmark_script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measure.main(["fails", "fake"]) == 1
    assert "error: failed: see build/figures/fails.log" in capsys.readouterr().out
    assert [file.name for file in (tmp_path / "docs" / "figures").iterdir()] == ["fake.json"]


def test_a_measurement_is_kept_although_another_is_missing(
    benchmark_script: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("<!-- figures store -->\n<!-- end -->\n")
    assert measure.main(["fake"]) == 1
    assert "there is no docs/figures/store.json" in capsys.readouterr().out
    assert (tmp_path / "docs" / "figures" / "fake.json").exists()


def test_what_a_page_cannot_show_does_not_replace_what_it_shows(
    benchmark_script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(measure, "BUSY", float("inf"))
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    (tmp_path / "docs" / "page.md").write_text("<!-- figures rows -->\n<!-- end -->\n")
    file = tmp_path / "docs" / "figures" / f"rows-{measurement.machine_of()['class']}.json"
    for before in (None, "what was there"):
        if before:
            file.write_text(before)
        assert measure.main(["rows"]) == 1
        assert f"{file.name} lacks what it shows" in capsys.readouterr().out
        assert (file.read_text() if file.exists() else None) == before


def test_a_file_of_each_machine_says_what_is_special_about_it() -> None:
    run = measure.Run("rows", commands.COMMANDS["rows"], None)
    found = {"machine": {"class": "avx2", "load_before": 0.1}}
    assert run.file(found) == "rows-avx2"
    found["machine"] |= {"limited": True, "load_before": 3.0}
    assert run.file(found) == "rows-avx2-limited-busy"
    assert measure.Run("store", commands.COMMANDS["store"], None).file(found) == "store"


def test_nothing_is_measured_beside_other_programs(
    benchmark_script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (1.34, 0.1, 0.1))
    assert measure.main(["fake"]) == 2
    assert "the load is 1.34" in capsys.readouterr().err
    assert list((tmp_path / "docs" / "figures").iterdir()) == []
    measure.main(["fake", "--busy"])
    assert len(list((tmp_path / "docs" / "figures").iterdir())) == 1


def test_an_unknown_name_is_refused(benchmark_script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert measure.main(["fake", "nothing"]) == 2
    assert "there is no 'nothing'; choose from fake" in capsys.readouterr().err


def test_traces_stand_in_the_command_and_their_folder_on_no_page(tmp_path: Path) -> None:
    run = measure.Run("software", commands.COMMANDS["software"], tmp_path)
    assert str(tmp_path / "tau_retail.jsonl.gz") in run.words
    assert "--traces tau_retail.jsonl.gz " in run.shown
    with pytest.raises(measure.Absent, match=r"tau_retail\.jsonl\.gz"):
        run.check()


@pytest.mark.parametrize(
    ("features", "kind"),
    [(("avx2",), "avx2"), (("avx2", "avx512f"), "avx512"), (("avx2", "avx512f", "avx512bf16"), "avx512-bf16"),
     (("avx2", "avx512f", "avx512bf16", "amx-bf16"), "amx"), ((), "other")],
)  # fmt: skip
def test_the_class_of_a_machine_is_the_best_of_its_features(features: tuple[str, ...], kind: str) -> None:
    assert measurement.machine_class(dict.fromkeys(features, True)) == kind
    assert tuple(measurement.CLASSES) == cells.CLASSES


@pytest.mark.skipif(not features_for("native").get("avx2"), reason="this processor has no AVX2")
def test_with_lesser_kernels_the_machine_is_of_their_class() -> None:
    found = measurement.Measurement("precedent demo", kernels="avx2").as_dict(1)["machine"]
    assert (found["class"], found["instructions"], found["limited"]) == ("avx2", "AVX2", True)
    assert "limited" not in measurement.machine_of()


def test_a_command_is_shown_as_it_is_typed(tmp_path: Path) -> None:
    traces = tmp_path / "tau.jsonl.gz"
    traces.touch()
    script = str(ROOT / "tests" / "benchmarks" / "bench_rows.py")
    given = [script, "--traces", str(traces), "--json", "out.json", "--rows", "1", "4", "--json=out.json"]
    python = measurement.interpreter()
    shown = measurement.typed(given, {"PRECEDENT_CPU_KERNELS": "avx2"})
    assert shown == (
        f"PRECEDENT_CPU_KERNELS=avx2 {python} tests/benchmarks/bench_rows.py --traces tau.jsonl.gz --rows 1 4"
    )
    assert measurement.interpreter(ROOT / ".venv") == "python"
    assert measurement.interpreter(ROOT / ".venv-ray") == ".venv-ray/bin/python"


def test_numbers_have_four_digits_and_what_is_no_number_is_null() -> None:
    found = {"a": [1.23456, 123456, float("inf")], "b": (True, "text", None)}
    assert measurement.in_four_digits(found) == {"a": [1.235, 123456, None], "b": [True, "text", None]}
