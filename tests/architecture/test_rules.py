"""Rules of the code base that no reviewer should have to repeat, read from the syntax trees of all modules."""

from __future__ import annotations

import ast
import functools
import os
import re
import shutil
import subprocess
import sys
import tokenize
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
SERVICES = sorted((REPOSITORY / "services").rglob("*.py"))
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))
BENCH = sorted((REPOSITORY / "bench").rglob("*.py"))
LAYERS = ("wire", "runtime", "model_files", "services", "launcher")  # each may import those before it
ROLES = ("tokenizer", "scheduler", "gpu_worker", "detokenizer")

MAX_LINES = 400
FORBIDDEN_MODULES = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
FORBIDDEN_CALLS = {"eval", "exec", "__import__", "torch.load", "os.system", "os.popen", "yaml.load"}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj", "recv_json", "send_json"}
ENVIRONMENT_OWNER = "services/runtime/config.py"
ENVIRONMENT = {"environ", "environb", "getenv", "getenvb", "putenv", "unsetenv"}
VAGUE_NAMES = re.compile(r"(^|_)(utils?|helpers?|manager|base|common|misc)(_|$)|Mixin$|Impl$|^Base[A-Z]|Base$|Manager$")
MACHINE_PATHS = re.compile(r"/(?:work|root|tmp)/(?:main|shared|setup)|\.\./shared")


def name_of(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


@functools.cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), name_of(path))


@functools.cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    """All of a tree, which many rules look through."""
    return tuple(ast.walk(tree_of(path)))


def imported_modules(path: Path) -> Iterator[str]:
    for node in nodes_of(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted(node: ast.expr) -> str:
    """`a.b.c` of an expression, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return ""


def comments_of(path: Path) -> list[str]:
    with path.open("rb") as file:
        return [token.string for token in tokenize.tokenize(file.readline) if token.type == tokenize.COMMENT]


Rule = Callable[[Path], None]
RULES: list[tuple[Rule, list[Path]]] = []
"""What is asserted of a module, and of which modules: one test each, so that thousands of them cost nothing."""


def holds_in(paths: list[Path]) -> Callable[[Rule], Rule]:
    def register(rule: Rule) -> Rule:
        RULES.append((rule, paths))
        return rule

    return register


every_service_module = holds_in(SERVICES)
every_module = holds_in(SERVICES + TESTS + BENCH)
every_test_module = holds_in(TESTS)


@every_service_module
def imports_go_down_the_layers_and_never_between_services(path: Path) -> None:
    parts = path.relative_to(REPOSITORY / "services").parts
    if len(parts) == 1:
        return
    own = parts[0]
    level = LAYERS.index("services" if own in ROLES else own)
    for module in imported_modules(path):
        if not module.startswith("services."):
            continue
        other = module.split(".")[1]
        other_level = LAYERS.index("services" if other in ROLES else other)
        assert other == own or other_level < level, f"{name_of(path)} imports {module}"


@every_service_module
def torch_is_imported_in_gpu_worker_only(path: Path) -> None:
    if path.relative_to(REPOSITORY / "services").parts[0] == "gpu_worker":
        return
    roots = {module.split(".")[0] for module in imported_modules(path)}
    assert not roots & {"torch", "triton", "safetensors"}


@every_module
def nothing_reads_objects_or_code_from_bytes(path: Path) -> None:
    """Security rule 1: no pickle family, no eval, no torch.load, no shell."""
    roots = {module.split(".")[0] for module in imported_modules(path)}
    assert not roots & FORBIDDEN_MODULES
    for node in nodes_of(path):
        if not isinstance(node, ast.Call):
            continue
        called = dotted(node.func)
        assert called not in FORBIDDEN_CALLS, f"line {node.lineno}"
        assert called.rsplit(".", 1)[-1] not in FORBIDDEN_METHODS, f"line {node.lineno}"
        for keyword in node.keywords:
            is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
            assert not (keyword.arg in ("shell", "allow_pickle", "trust_remote_code") and is_true), (
                f"line {node.lineno}"
            )


@every_service_module
def the_environment_is_read_and_written_in_one_place(path: Path) -> None:
    if name_of(path) == ENVIRONMENT_OWNER:
        return
    assert not {f"os.{name}" for name in (*ENVIRONMENT, "*")} & set(imported_modules(path))
    for node in nodes_of(path):
        if isinstance(node, ast.Attribute):  # whatever `os` is called here
            assert node.attr not in ENVIRONMENT, f"line {node.lineno}"


@every_module
def modules_are_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@every_module
def modules_say_what_they_are(path: Path) -> None:
    if path.name == "__main__.py" or path.stat().st_size == 0:
        return
    docstring = ast.get_docstring(tree_of(path))
    assert docstring is not None
    assert len(docstring) > 20


@every_service_module
def public_names_have_docstrings(path: Path) -> None:
    for node in tree_of(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            assert ast.get_docstring(node), f"{node.name} in line {node.lineno}"


@every_module
def nothing_is_left_for_later_and_no_error_is_swallowed(path: Path) -> None:
    assert not [comment for comment in comments_of(path) if re.search(r"\b(TODO|FIXME|XXX|HACK)\b", comment)]
    assert path == Path(__file__) or not MACHINE_PATHS.search(path.read_text(encoding="utf-8"))
    for node in nodes_of(path):
        if isinstance(node, ast.Raise) and node.exc is not None:
            raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
            assert dotted(raised) != "NotImplementedError", f"line {node.lineno}"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, f"bare except in line {node.lineno}"
            is_broad = dotted(node.type) in ("Exception", "BaseException")
            assert not (is_broad and all(isinstance(part, ast.Pass) for part in node.body)), f"line {node.lineno}"


@every_service_module
def names_say_something(path: Path) -> None:
    names = [path.stem, *(node.name for node in nodes_of(path) if isinstance(node, ast.ClassDef))]
    assert not [name for name in names if VAGUE_NAMES.search(name)]


@every_test_module
def no_test_sleeps(path: Path) -> None:
    """`asyncio.sleep(0)` lets the loop turn; anything longer hopes that something has happened by then."""
    for node in nodes_of(path):
        if isinstance(node, ast.Call) and dotted(node.func) in ("time.sleep", "asyncio.sleep", "sleep"):
            [argument] = node.args
            assert isinstance(argument, ast.Constant), f"line {node.lineno}"
            assert argument.value == 0, f"line {node.lineno}"


@every_test_module
def every_test_is_collected(path: Path) -> None:
    """Pytest runs what is called `test_*` in files called `test_*.py`, and nothing else."""
    functions = [node.name for node in tree_of(path).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    has_tests = any(name.startswith("test_") for name in functions)
    assert has_tests == path.name.startswith("test_") or "TestCase" in path.read_text(encoding="utf-8")
    assert len(functions) == len(set(functions)), "a second function of a name replaces the first"


@every_service_module
def a_log_line_about_a_request_carries_its_id_beside_the_text(path: Path) -> None:
    """`extra=about(request_id)`: as a field of a JSON line it can be searched for in the logs of every process."""
    for call in [node for node in nodes_of(path) if isinstance(node, ast.Call)]:
        match call.func:
            case ast.Attribute(value=ast.Name(id="logger" | "_log" | "logging")):
                told = " ".join(ast.unparse(argument) for argument in call.args)
                assert "request_id" not in told, f"line {call.lineno}"
            case _:
                pass


@pytest.mark.parametrize(("rule", "paths"), RULES, ids=lambda part: getattr(part, "__name__", "modules"))
def test_a_rule_holds_in_every_module(rule: Rule, paths: list[Path]) -> None:
    broken = []
    for path in paths:
        try:
            rule(path)
        except AssertionError as error:
            broken.append(f"{name_of(path)}: {error}")
    assert not broken, "\n".join(broken)


def test_import_contracts() -> None:
    """The contracts of pyproject.toml, as `make lint` checks them."""
    command = shutil.which("lint-imports", path=os.path.dirname(sys.executable))
    if command is None:
        pytest.skip("import-linter is not installed; `make lint` installs and runs it")
    result = subprocess.run([command, "--no-cache"], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("services.tokenizer.service", "torch triton safetensors transformers opentelemetry"),
        ("services.detokenizer.service", "torch triton safetensors transformers tokenizers aiohttp jinja2"),
        ("services.scheduler.service", "torch triton safetensors transformers tokenizers aiohttp jinja2 gguf"),
        ("services.launcher.cli", "torch triton safetensors transformers tokenizers aiohttp jinja2"),
    ],
)
def test_a_process_loads_no_library_of_another(module: str, absent: str) -> None:
    script = f"import sys, {module}; print(*{{name.split('.')[0] for name in sys.modules}})"
    command = [sys.executable, "-W", "error", "-c", script]
    loaded = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout.split()
    assert not set(loaded) & set(absent.split())
