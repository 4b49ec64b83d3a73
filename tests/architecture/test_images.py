"""Images hold what their code imports: the launcher is in every one, with the packages that are copied beside it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = re.compile(r"^COPY services/(\w+) services/\1$", re.MULTILINE)


def packages_imported_by(package: str) -> set[str]:
    """Our own packages that a package's modules import, wherever in a module."""
    found = set()
    for path in (ROOT / "services" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            found |= {name.split(".")[1] for name in names if name.startswith("services.")}
    return found - {package}


def test_every_image_holds_what_the_launcher_and_its_shared_packages_import() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    [shared] = re.findall(r"^FROM base AS shared$(.*?)^FROM ", dockerfile, re.MULTILINE | re.DOTALL)
    copied = set(COPIED.findall(shared))
    assert "launcher" in copied
    for package in copied:
        assert packages_imported_by(package) <= copied, package
