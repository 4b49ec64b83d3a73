"""docs/testing.md lists every case that a test is named by, and each test file that it names has such a test."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

from tests.architecture.markdown_tables import table_after

TESTS = Path(__file__).parents[1]
TEXT = (TESTS.parent / "docs" / "testing.md").read_text(encoding="utf-8")
CASE = re.compile(r"((?!and)[a-z]{3}_\d\d)(?=_)")
NAMED = re.compile(r"test_(?:(?:and_)?[a-z]{3}_\d\d_)+")


def files_by_case() -> dict[str, set[str]]:
    """DET-02 -> the files, relative to tests/, with a test that begins with its number."""
    found: dict[str, set[str]] = defaultdict(set)
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (named := NAMED.match(node.name)):
                for case in CASE.findall(named[0]):
                    found[case.upper().replace("_", "-")].add(str(path.relative_to(TESTS)))
    return found


def test_every_case_has_a_row_and_every_row_is_held_or_says_why_not() -> None:
    rows = {case: cell for case, _, cell in table_after(TEXT, "| case | what went wrong elsewhere | held by |")}
    files = files_by_case()
    assert set(files) <= set(rows)
    for case, cell in rows.items():
        named = set(re.findall(r"`([^`]+\.py)`", cell))
        assert named <= files.get(case, set()), case
        assert named or cell.startswith("later: "), case
