"""Figures on pages are those of their files."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

sys.path[:0] = [str(ROOT / ".ci"), str(ROOT / "benchmarks")]
try:
    figures, measure, measuring = map(importlib.import_module, ("figures", "measure", "measuring"))
finally:
    del sys.path[:2]

PAGE = "Before.\n\n<!-- figures rows -->\n| typed | by hand |\n<!-- end -->\n\nAfter.\n"
AVX512 = {"class": "avx512", "processor": "A", "instructions": "AVX-512", "cores": 2, "load_before": 0.1}
AVX2 = AVX512 | {"class": "avx2", "instructions": "AVX2", "limited": True}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    (tmp_path / "docs" / "page.md").write_text(PAGE, encoding="utf-8")
    return tmp_path


def add(site: Path, name: str = "rows-avx512", machine: Any = AVX512, widths: Any = (1, 4, 8, 16, 32, 48)) -> None:
    steps = {str(width): {"together": 10.04 + width} for width in widths}
    found = {"source": "measured", "command": "python benchmarks/bench.py", "date": "2026-11-24", "machine": machine}
    text = json.dumps(found | {"figures": {"steps": steps}})
    (site / "docs" / "figures" / f"{name}.json").write_text(text, encoding="utf-8")


def shown(site: Path) -> str:
    return (site / "docs" / "page.md").read_text(encoding="utf-8")


def test_the_pages_show_what_the_files_say() -> None:
    assert list(figures.written(ROOT, check=True)) == [], "run make reference"


def test_a_table_comes_from_its_files_and_the_rest_of_the_page_stays(site: Path) -> None:
    add(site, "rows-avx2-limited", AVX2)
    add(site)
    assert len(list(figures.written(site, check=True))) == 1
    assert shown(site) == PAGE, "checking changes nothing"
    assert list(figures.written(site, check=False)) == list(figures.written(site, check=True)) == []
    assert shown(site).startswith("Before.\n\n<!-- figures rows -->\n")
    assert shown(site).endswith("<!-- end -->\n\nAfter.\n")
    rows = re.findall(r"^\| AVX.*\|$", shown(site), re.MULTILINE)
    assert rows == [f"| {kind} | 11.0 | 14.0 | 18.0 | 26.0 | 42.0 | 58.0 |" for kind in ("AVX-512", "AVX2, limited")]
    assert "\n\n`python benchmarks/bench.py`, 2026-11-24.\n" in shown(site)


def test_what_a_table_lacks_is_named_and_no_page_is_changed(site: Path) -> None:
    with pytest.raises(SystemExit, match=r"no docs/figures/rows-\*\.json"):
        list(figures.written(site, check=False))
    add(site, widths=(1,))
    with pytest.raises(SystemExit, match=r"lacks 'rows' or a part \(KeyError\('4'\)\)"):
        list(figures.written(site, check=False))
    assert shown(site) == PAGE


def test_every_file_has_a_command_and_every_command_a_file_and_a_program() -> None:
    found = {path.stem.split("-a")[0] if path.stem.split("-a")[0] in measure.BY_MACHINE else path.stem: path
             for path in (ROOT / "docs" / "figures").glob("*.json")}  # fmt: skip
    assert set(found) == set(measure.COMMANDS)
    programs = {command.split()[0] for command in measure.COMMANDS.values()} - {"precedent", "python"}
    assert [name for name in programs if not (ROOT / "benchmarks" / name).is_file()] == []


def test_a_measurement_is_kept_with_command_date_and_machine(tmp_path: Path) -> None:
    given = [str(ROOT / "benchmarks" / "bench_rows.py"), "--traces", __file__, "--json", "out.json", "--json=out.json"]
    typed = measuring.typed(given, {"PRECEDENT_CPU_KERNELS": "avx2"})
    assert re.fullmatch(
        r"PRECEDENT_CPU_KERNELS=avx2 \S*python benchmarks/bench_rows.py --traces test_figures.py", typed
    )
    measuring.Measurement(typed).write(tmp_path / "out.json", {"value": 1 / 3, "none": float("inf")})
    found = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert found["figures"] == {"value": 0.3333, "none": None}
    assert found["command"] == typed
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found["date"])
    assert found["machine"].items() >= measuring.machine_of().items()
