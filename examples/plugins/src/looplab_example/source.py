"""A metric source: tables separated by tabs, with a header line."""

from __future__ import annotations

from looplab.measure.lines import LineSource


class TsvSource(LineSource):
    """`step<TAB>loss`, then a row per step."""

    kind = "tsv"
    header: list[str] | None = None

    @staticmethod
    def matches(name: str) -> bool:
        return name.endswith(".tsv")

    def parse_line(self, line: str) -> dict[str, float] | None:
        cells = line.split("\t")
        if self.header is None:
            self.header = cells
            return None
        return {name: float(cell) for name, cell in zip(self.header, cells, strict=True) if cell}

    def on_restart(self) -> None:
        self.header = None
