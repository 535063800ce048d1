"""The table of rooms in CONTRIBUTING.md: every module of aura/ stands in it once, and none imports from a row below."""

import ast
import re

from tests.support import ROOT

PACKAGE = ROOT / "aura"


def rows():
    """{module: its row}, of the table."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    [table] = re.findall(r"\| What for \| Modules \|\n\|---\|---\|\n((?:\|.*\n)+)", text)
    named = [(module, number) for number, line in enumerate(table.splitlines())
             for module in re.findall(r"`(\w+)`", line.split("|")[2])]
    assert len(dict(named)) == len(named), "a module stands in two places"
    return dict(named)


def imported(path):
    """The rooms of aura/ that a source takes something from, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module == "aura":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aura."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (alias.name.split(".")[1] for alias in node.names if alias.name.startswith("aura."))


def test_each_module_has_a_row_and_imports_nothing_from_below():
    row = rows()
    files = {path: path.relative_to(PACKAGE).parts[0].removesuffix(".py") for path in PACKAGE.rglob("*.py")}
    assert set(row) == set(files.values()) - {"__init__"}
    below = [f"{room} imports {other}" for path, room in files.items() if room in row
             for other in imported(path) if row.get(other, 0) > row[room]]
    assert not below
