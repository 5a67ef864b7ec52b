"""The tables that a run ends with, for people and as JSON.

A cell is a number or a text; a number is rounded only where it is shown, so the JSON has what was
measured. Whatever could not be measured is a text that says why, never a zero. Pure.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

__all__ = ["Cell", "Column", "Table", "render", "to_json"]

Cell = float | int | str | None
"""None is an empty cell: there is nothing to measure."""


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        head: what it shows, with unit.
        digits: digits after the point of its numbers.
    """

    head: str
    digits: int = 2


@dataclass(frozen=True)
class Table:
    """One subject.

    Attributes:
        name: the part of the benchmark, as `--only` names it.
        title: what was measured, and how.
        columns: in order.
        rows: one cell for each column.
        notes: sentences below it: what the ceiling is, what the aim, what could not be measured.
    """

    name: str
    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for row in self.rows:
            assert len(row) == len(self.columns), (self.title, row)


def render(facts: Mapping[str, str], tables: Iterable[Table]) -> str:
    """Return everything as text.

    Args:
        facts: the machine, the versions; shown first.
        tables: shown in order.
    """
    width = max((len(name) for name in facts), default=0)
    lines = [f"{name:{width}}  {value}" for name, value in facts.items()]
    for table in tables:
        lines += ["", table.title, *_grid(table), *(f"  {note}" for note in table.notes)]
    return "\n".join(lines) + "\n"


def to_json(facts: Mapping[str, str], tables: Sequence[Table]) -> bytes:
    """Return everything as JSON, with numbers as they were measured."""
    page = {
        "facts": dict(facts),
        "tables": [
            {
                "name": table.name,
                "title": table.title,
                "columns": [column.head for column in table.columns],
                "rows": table.rows,
                "notes": table.notes,
            }
            for table in tables
        ],
    }
    return msgspec.json.format(msgspec.json.encode(page), indent=1) + b"\n"


def _grid(table: Table) -> list[str]:
    if not table.columns:
        return []
    heads = [column.head for column in table.columns]
    texts = [
        [_text(cell, column.digits) for cell, column in zip(row, table.columns, strict=True)]
        for row in table.rows
    ]
    widths = [max(map(len, cells)) for cells in zip(heads, *texts, strict=True)]
    rule = "  ".join("-" * width for width in widths)
    return [_line(heads, widths), rule, *(_line(row, widths) for row in texts)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    # The first column names the row; what follows are figures, which read best flush right.
    first = cells[0].ljust(widths[0])
    rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([first, *rest]).rstrip()


def _text(cell: Cell, digits: int) -> str:
    if cell is None:
        return ""
    if isinstance(cell, int | float):
        return f"{cell:,.{digits}f}"
    return cell
