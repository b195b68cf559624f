"""The metrics of all replicas as one text: every series says which replica it is of."""

from __future__ import annotations

from collections.abc import Mapping

_OF_HISTOGRAMS = ("_bucket", "_sum", "_count")
"""How the names of a histogram's series end."""


def merged(texts: Mapping[str, str]) -> str:
    """Prometheus texts by replica as one, each series with the label `replica`; HELP and TYPE stand once per name.

    Nothing is added up: sums over counters of replicas that come and go are Prometheus's to make (`sum by …`).
    """
    heads: dict[str, list[str]] = {}
    series: dict[str, list[str]] = {}
    for replica, text in texts.items():
        for line in text.splitlines():
            if line.startswith("#"):
                name = line.split(" ", 3)[2]
                lines = heads.setdefault(name, [])
                lines += [line] if line not in lines else []
            elif line:
                name = line.partition("{")[0].partition(" ")[0]
                family = name.rpartition("_")[0] if name.endswith(_OF_HISTOGRAMS) else name
                name = family if family in heads else name
                series.setdefault(name, []).append(_labelled(line, replica))
    names = [*heads, *(name for name in series if name not in heads)]
    return "".join(f"{line}\n" for name in names for line in [*heads.get(name, []), *series.get(name, [])])


def _labelled(line: str, replica: str) -> str:
    label = f'replica="{replica}"'
    name, brace, rest = line.partition("{")
    if brace:
        return f"{name}{{{label},{rest}"
    name, _, value = line.partition(" ")
    return f"{name}{{{label}}} {value}"
