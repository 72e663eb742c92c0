"""MkDocs calls this for each page: a line `<!-- docstring of FILE -->` becomes what that module says of itself.

So a page that explains a module in full cannot say anything else than its source. Paragraphs that are laid out in
columns are shown as they stand.
"""

import ast
import re
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).resolve().parents[1]
MARK = re.compile(r"^<!-- docstring of ([\w./]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page with its docstrings."""
    return MARK.sub(lambda found: read_docstring(ROOT / found[1]), markdown)


def read_docstring(path: Path) -> str:
    """Return a module's docstring as Markdown, without its first line, which the page's own text replaces."""
    docstring = ast.get_docstring(ast.parse(path.read_text()))
    assert docstring is not None, f"{path} has no docstring"
    paragraphs = docstring.split("\n\n")
    return "\n\n".join(as_markdown(paragraph) for paragraph in paragraphs[1:] or paragraphs)


def as_markdown(paragraph: str) -> str:
    """Return prose as it is, and columns (indented lines, or words set apart by spaces) in a block of code."""
    in_columns = all(re.match(r" +|.*\S {3,}\S", line) for line in paragraph.splitlines())
    return f"```text\n{dedent(paragraph)}\n```" if in_columns else paragraph
