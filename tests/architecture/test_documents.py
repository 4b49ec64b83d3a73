"""The documents say what is: links lead somewhere, every name is in the code, tables are the code's own.

Code is looked up in syntax trees, so that no process's libraries are loaded for it.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.runtime import metric_texts, setting_ranges
from services.runtime.config import Settings
from tests.architecture.markdown_tables import table_after

REPOSITORY = Path(__file__).parents[2]
SERVICES = REPOSITORY / "services"
PACKAGES = frozenset(path.name for path in SERVICES.iterdir() if (path / "__init__.py").is_file())
# A name without a folder is in the document's own service.
DOCUMENTS = {
    "README.md": "",
    "docs/architecture.md": "",
    "docs/scheduling.md": "scheduler",
    "docs/kv-cache.md": "scheduler",
    "docs/operations.md": "",
}
GENERATED = frozenset({"node_modules", "build", "dist"})

CODE_BLOCK = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
DOTTED = re.compile(r"[a-z_]\w*(?:\.\w+)+")
CLASS = re.compile(r"[A-Z][a-z]\w*")
CONSTANT = re.compile(r"`([\w.]+\.[A-Z_]+)` = (-?[\d,.]*\d)")
MAKERS = frozenset({"counter", "gauge", "histogram", "labelled_counter", "labelled_gauge", "labelled_histogram"})
FLAG = re.compile(r"`?(--[a-z][a-z-]+)")
FILE_SUFFIXES = frozenset({"cfg", "gguf", "jinja", "json", "jsonl", "md", "py", "safetensors", "sock", "toml", "yaml"})


def text_of(name: str) -> str:
    return (REPOSITORY / name).read_text(encoding="utf-8")


def markdown_files() -> list[str]:
    found: list[str] = []
    for folder, folders, files in os.walk(REPOSITORY):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in GENERATED]
        found += [str(Path(folder, name).relative_to(REPOSITORY)) for name in files if name.endswith(".md")]
    return sorted(found)


# ---------------------------------------------------------------- links


def anchors_of(name: str) -> set[str]:
    """The anchors that GitHub gives to the headings of a document."""
    headings = re.findall(r"^#+ (.+)$", CODE_BLOCK.sub("", text_of(name)), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", markdown_files())
def test_relative_links_lead_to_files_and_headings(name: str) -> None:
    for target in LINK.findall(CODE_BLOCK.sub("", text_of(name))):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        linked = (REPOSITORY / name).parent / path if path else REPOSITORY / name
        assert linked.exists(), target
        if anchor:
            assert anchor in anchors_of(str(linked.resolve().relative_to(REPOSITORY))), target


def test_the_readme_leads_to_every_document() -> None:
    linked = {target.partition("#")[0] for target in LINK.findall(text_of("README.md"))}
    assert {name for name in markdown_files() if re.fullmatch(r"docs/[^/]+\.md", name)} <= linked


# ---------------------------------------------------------------- names


@functools.cache
def members_of(path: Path) -> dict[str, ast.AST]:
    """What a module defines."""
    return _defined(ast.parse(path.read_text(encoding="utf-8")).body)


def _defined(body: list[ast.stmt]) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in body:
        match node:
            case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                found[node.name] = node
            case ast.Assign(targets=targets):
                found |= {target.id: node for target in targets if isinstance(target, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                found[name] = node
            case _:
                pass
    return found


def _attributes(cls: ast.ClassDef) -> dict[str, ast.AST]:
    """Methods, fields, and what the methods assign to `self`."""
    assigned = {
        node.attr: node
        for node in ast.walk(cls)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Store)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }
    return {**assigned, **_defined(cls.body)}


def find(name: str, own_package: str) -> ast.AST | None:
    """What a dotted name means: folders, a module, then names in it. None when there is no such thing."""
    parts = name.split(".")
    if parts[0] not in PACKAGES:
        parts = [own_package, *parts] if own_package else ["", *parts]
    path = SERVICES / parts[0]
    rest = parts[1:]
    while rest and (path / rest[0]).is_dir():
        path /= rest.pop(0)
    if not rest or not (module := path / f"{rest[0]}.py").is_file():
        return None
    found: ast.AST = ast.Module([], [])
    names = members_of(module)
    for part in rest[1:]:
        if part not in names:
            return None
        found = names[part]
        names = _attributes(found) if isinstance(found, ast.ClassDef) else {}
    return found


@functools.cache
def class_names() -> frozenset[str]:
    paths = SERVICES.rglob("*.py")
    return frozenset(
        name for path in paths for name, node in members_of(path).items() if isinstance(node, ast.ClassDef)
    )


def codes_of(name: str) -> Iterator[str]:
    yield from CODE.findall(CODE_BLOCK.sub("", text_of(name)))


@pytest.mark.parametrize(("name", "package"), DOCUMENTS.items())
def test_names_in_documents_exist(name: str, package: str) -> None:
    """Dotted names are modules and what is in them, capitalised words are classes, paths are files."""
    for code in codes_of(name):
        if code.startswith(tuple(f"{folder.name}/" for folder in REPOSITORY.iterdir() if folder.is_dir())):
            assert list(REPOSITORY.glob(code.rstrip("/"))), code
        elif DOTTED.fullmatch(code) and code.rsplit(".", 1)[-1] not in FILE_SUFFIXES:
            is_ours = package or code.split(".")[0] in PACKAGES
            assert not is_ours or find(code, package) is not None, code
        elif CLASS.fullmatch(code):
            assert code in class_names(), code


def test_the_names_on_the_way_of_a_token_are_looked_up() -> None:
    """Guards the test above: the page is made of such names."""
    codes = list(codes_of("docs/architecture.md"))
    assert len([code for code in codes if code.split(".")[0] in PACKAGES and DOTTED.fullmatch(code)]) > 80
    assert find("tokenizer.completions.Completions.chat", "") is not None
    assert find("tokenizer.completions.Completions.chatter", "") is None
    assert find("tokenizer.competitions.Completions.chat", "") is None


@pytest.mark.parametrize(("name", "package"), DOCUMENTS.items())
def test_constants_have_the_values_that_documents_give(name: str, package: str) -> None:
    for constant, value in CONSTANT.findall(text_of(name)):
        node = find(constant, package)
        assert isinstance(node, ast.Assign | ast.AnnAssign), constant
        assert node.value is not None
        assert ast.literal_eval(node.value) == float(value.replace(",", "")), constant


# ---------------------------------------------------------------- settings


def settings_rows() -> list[list[str]]:
    """The rows of the settings table: flag, default, values, meaning."""
    ranges = {name: (low, high) for name, low, high in setting_ranges.RANGES}
    rows = []
    for field in dataclasses.fields(Settings):
        if field.name in ranges:
            values = "{} to {}".format(*ranges[field.name])
        elif field.type == "bool":
            values = "true, false"
        else:
            values = ", ".join(f"`{choice}`" for choice in field.metadata["choices"])
        default = str(field.default).lower() if field.type == "bool" else str(field.default)
        flag = f"`--{field.name.replace('_', '-')}`"
        rows.append([flag, f"`{default}`" if default else "", values, field.metadata["help"]])
    return rows


def test_the_settings_table_is_what_can_be_set() -> None:
    rows = table_after(text_of("docs/operations.md"), "| flag | default | values | meaning |")
    assert rows == settings_rows()


@pytest.mark.parametrize("name", markdown_files())
def test_flags_of_the_server_exist(name: str) -> None:
    """Wherever a document shows `tokenway serve` or names a flag of it."""
    known = {row[0].strip("`") for row in settings_rows()} | {"--role", "--config", "--help", "--version", "--to"}
    known |= {flag.replace("--", "--no-", 1) for flag in known}
    served = [line for line in text_of(name).splitlines() if "tokenway serve" in line]
    named = [code for code in codes_of(name) if code.startswith("--") and name in DOCUMENTS]
    for flag in FLAG.findall("\n".join([*served, *named])):
        assert flag in known, flag


# ---------------------------------------------------------------- metrics


def metric_names(path: Path) -> set[tuple[str, str]]:
    """(name without prefix, kind) of every metric that a module makes with the makers of `runtime.metrics`."""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
    return {(name, kind) for call in calls for name, kind in _made_by(call)}


def _made_by(call: ast.Call) -> Iterator[tuple[str, str]]:
    match call:
        case ast.Call(func=ast.Name(id=maker), args=[ast.Constant(value=str(name)), *_]) if maker in MAKERS:
            yield name, _kind(call)
        case _:
            pass


def _kind(call: ast.Call) -> str:
    made = ast.unparse(call.func)
    return next((kind for kind in ("counter", "gauge") if kind in made.lower()), "histogram")


TEXTS_OF_ROLES = {
    "tokenizer": metric_texts.OF_TOKENIZER,
    "scheduler": metric_texts.OF_SCHEDULER,
    "gpu_worker": metric_texts.OF_GPU_WORKER,
    "detokenizer": metric_texts.OF_DETOKENIZER,
}


@pytest.mark.parametrize("role", TEXTS_OF_ROLES)
def test_the_metrics_are_those_of_the_code(role: str) -> None:
    """Names and kinds are what the instruments make, the texts what /metrics says of them."""
    section = text_of("docs/operations.md").split(f"### Of the {role}\n", 1)[1]
    rows = table_after(section, "| name | kind | what |")
    made = metric_names(SERVICES / role / "instruments.py")
    assert {(row[0].strip("`"), row[1]) for row in rows} == made
    assert [(row[0].strip("`"), row[2]) for row in rows] == list(TEXTS_OF_ROLES[role].items())
    assert len(rows) > 5


# ---------------------------------------------------------------- the README


def folders_below(path: Path) -> set[str]:
    """The folders directly below one that hold files of ours."""
    return {
        str(folder.relative_to(REPOSITORY))
        for folder in path.iterdir()
        if folder.is_dir()
        and not folder.name.startswith((".", "__"))
        and not folder.name.endswith(".egg-info")
        and folder.name not in GENERATED
        and any(file.is_file() and "__pycache__" not in file.parts for file in folder.rglob("*"))
    }


def test_the_tree_of_the_readme_is_the_tree() -> None:
    block = text_of("README.md").split("```tree\n", 1)[1].split("```", 1)[0]
    named = {line.split()[0].rstrip("/") for line in block.splitlines() if line.strip()}
    assert all(len(line.split()) > 2 for line in block.splitlines() if line.strip()), "a phrase for each folder"
    assert not [path for path in named if not (REPOSITORY / path).exists()]
    expected = folders_below(REPOSITORY) | folders_below(SERVICES) | folders_below(REPOSITORY / "tests")
    assert expected - named <= {"services", "tests"}
