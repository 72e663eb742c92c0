"""Write `options.md` from the docstring of `tencache_fx/options.py`, which is where the options are explained.

Run `python docs/write_options.py` when that has changed; a test says so.
"""

import ast
import re
from pathlib import Path

DOCS = Path(__file__).resolve().parent
MARKS = ("<!-- options: written by docs/write_options.py -->", "<!-- /options -->")


def table_rows(text: str) -> list[list[str]]:
    """Return a Markdown table without its heading; a row whose first cell is empty goes on with the one before."""
    rows: list[list[str]] = []
    for line in re.findall(r"^\|(.*)\|$", text, re.MULTILINE)[2:]:
        cells = [cell.strip() for cell in line.split("|")]
        if cells[0]:
            rows.append(cells)
        else:
            rows[-1] = [f"{before} {more}".strip() for before, more in zip(rows[-1], cells, strict=True)]
    return rows


def options_block() -> str:
    """Return the options as Markdown: a table, then what the docstring says of sizes and places."""
    docstring = ast.get_docstring(ast.parse((DOCS.parent / "tencache_fx" / "options.py").read_text()))
    assert docstring is not None
    lines = [f"| `{name}` | `{default}` | {text} |" for name, default, text in table_rows(docstring)]
    rest = docstring[docstring.rindex("|\n") + 2 :].strip()
    return "\n".join(["| option | default | what it is |", "|---|---|---|", *lines, "", rest])


def with_options(page: str) -> str:
    """Return the page with the options of the source between its marks."""
    start, end = (page.index(mark) for mark in MARKS)
    return f"{page[:start]}{MARKS[0]}\n\n{options_block()}\n\n{page[end:]}"


if __name__ == "__main__":
    path = DOCS / "options.md"
    path.write_text(with_options(path.read_text()))
