"""Each row of KNOWN_FAULTS.md that can be shown without the real weights has a test that names it.

In its name, `test_row_23_…` or `test_rows_23_and_25_…`, or in its docstring, `known_faults row 26: …`.
"""

import ast
import re
from collections import defaultdict
from pathlib import Path

TESTS = Path(__file__).parent
IN_NAME = re.compile(r"^test_rows?_(\d+(?:_(?:and_)?\d+)*)_")
IN_DOCSTRING = re.compile(r"\bknown_faults rows? (\d+(?:(?:, | and )\d+)*)")


def rows_of_the_table():
    """{number: its kinds}, those of `N`, `T` and `W` that its last column begins with."""
    rows = {}
    for line in (TESTS / "KNOWN_FAULTS.md").read_text(encoding="utf-8").splitlines():
        if re.match(r"\| \d", line):
            cells = line.strip().strip("|").split("|")
            assert len(cells) == 6, line
            number, kinds = int(cells[0]), set(re.findall(r"\b[NTW]\b", cells[-1].split(":")[0]))
            assert kinds, line
            assert number not in rows, line
            rows[number] = kinds
    return rows


def rows_named_by(name, docstring):
    named = [*IN_NAME.findall(name), *IN_DOCSTRING.findall(docstring)]
    return {int(number) for numbers in named for number in re.findall(r"\d+", numbers)}


def names_by_row():
    """{row: [file::test, …]}"""
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for row in rows_named_by(node.name, ast.get_docstring(node) or ""):
                    found[row].append(f"{path.relative_to(TESTS)}::{node.name}")
    return found


def test_every_row_that_needs_no_real_weights_is_named_by_a_test():
    named = names_by_row()
    assert [
        row for row, kinds in rows_of_the_table().items() if kinds & {"N", "T"} and row not in named
    ] == []


def test_no_test_names_a_row_that_is_not_there():
    rows = rows_of_the_table()
    assert {row: tests for row, tests in names_by_row().items() if row not in rows} == {}


def test_names_are_read_as_they_are_written():
    assert rows_named_by("test_rows_23_and_25_every_format", "") == {23, 25}
    assert rows_named_by("test_row_7_", "known_faults rows 3, 40 and 41: x. known_faults row 8.") == {
        7,
        3,
        40,
        41,
        8,
    }
    assert rows_named_by("test_rows_of_a_frame", "Decodes row 2, and rows 3 and 4.") == set()
