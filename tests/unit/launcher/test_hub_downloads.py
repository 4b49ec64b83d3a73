"""Fetching from the model hub: a small hub on this machine, and one that does not answer."""

from __future__ import annotations

import hashlib
import http.server
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.gpu_worker.attention.paged_cpu import reads_halves
from services.gpu_worker.products.kernels import has_fast_bfloat16

pytestmark = pytest.mark.timeout(60)

_ROOT = Path(__file__).parents[3]
_SHA = "1" * 40
_FILES = {
    "config.json": json.dumps(
        {
            "model_type": "llama",
            "vocab_size": 1000,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
        }
    ).encode(),
    "tokenizer.json": '{"你好": 1}'.encode(),
    "model.safetensors": os.urandom(300_000),
    "pytorch_model.bin": b"runs code",
    "consolidated.safetensors": b"the same weights again",
    "original/model.safetensors": b"and again",
    "README.md": b"text",
}


class _Hub(http.server.BaseHTTPRequestHandler):
    """Answers as the hub does for one repository; everything else is 404, one repository wants consent."""

    protocol_version = "HTTP/1.1"
    asked: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.asked.append(path)
        if path.startswith("/api/models/tiny/gated"):
            self._answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif path.startswith(("/api/models/tiny/bin-only", "/api/models/tiny/model", "/api/models/tiny/broken")):
            names = [name for name in _FILES if "bin-only" not in path or not name.endswith(".safetensors")]
            self._answer(200, json.dumps(self._listing(path, names)).encode(), {})
        elif path.startswith(f"/tiny/model/resolve/{_SHA}/") and path.split(f"{_SHA}/")[1] in _FILES:
            content = _FILES[path.split(f"{_SHA}/")[1]]
            self._answer(200, content, {"ETag": f'"{hashlib.sha1(content).hexdigest()}"', "X-Repo-Commit": _SHA})
        else:
            self._answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})

    def _listing(self, path: str, names: list[str]) -> object:
        if "/tree/" in path:
            return [
                {"type": "file", "path": name, "size": len(_FILES[name]), "oid": hashlib.sha1(_FILES[name]).hexdigest()}
                for name in names
            ]
        siblings = [{"rfilename": name, "size": len(_FILES[name])} for name in names]
        return {"id": "tiny/model", "modelId": "tiny/model", "sha": _SHA, "private": False, "siblings": siblings}

    def _answer(self, status: int, content: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Says nothing: the test looks at `asked`."""


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    """A hub: its address, and the paths that it was asked for."""
    asked: list[str] = []
    handler = type("Hub", (_Hub,), {"asked": asked})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


def _run(command: list[str], home: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home / "hf"), "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, *command], cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=40
    )


def _pull(name: str, to: Path, endpoint: str) -> subprocess.CompletedProcess[str]:
    return _run(["-m", "services.launcher", "models", "pull", name, "--to", str(to)], to.parent, endpoint)


def _diagnosed(name: str, home: Path, endpoint: str) -> list[list[str]]:
    """What the doctor finds of a model: name, verdict and text of each check."""
    script = (
        "import json, sys\n"
        "from services.launcher.doctor.model_checks import check_model\n"
        "from services.runtime.config import Settings\n"
        "found = check_model(Settings(model=sys.argv[1], models_dir=sys.argv[2], kv_cache_tokens=256))\n"
        "print(json.dumps([[finding.name, finding.verdict, finding.text] for finding in found]))"
    )
    result = _run(["-c", script, name, str(home / "models")], home, endpoint)
    assert result.returncode == 0, result.stderr
    return list(json.loads(result.stdout.splitlines()[-1]))


def test_a_pull_takes_safetensors_json_and_tokenizer_files_only(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    result = _pull("tiny/model", tmp_path / "models", endpoint)
    assert result.returncode == 0, result.stderr
    folder = tmp_path / "models" / "tiny--model"
    wanted = {"config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in folder.iterdir() if path.is_file()} == wanted
    assert all((folder / name).read_bytes() == _FILES[name] for name in wanted)
    assert not any(path.endswith((".bin", "README.md", "consolidated.safetensors")) for path in asked)
    assert "fetching tiny/model: 0.3 MB needed" in result.stdout
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]
    asked.clear()
    again = _pull("tiny/model", tmp_path / "models", endpoint)
    assert (again.returncode, again.stdout) == (0, f"{folder}: already there\n")
    assert asked == []


def test_whether_a_model_fits_is_known_before_it_is_fetched(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    room, fit = _diagnosed("tiny/model", tmp_path, endpoint)
    assert room[:2] == ["model", "ok"]
    assert room[2].startswith("tiny/model is not on this disk; fetching it takes 300.2 kB, ")
    assert fit[:2] == ["fit", "ok"]
    matrices = 1000 * 64 + 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 128)  # the head's and the layers'
    others = 1000 * 64 + 2 * 2 * 64 + 64
    kv_kb = 0.3 if reads_halves(16) else 0.5
    num_bytes = (2 if has_fast_bfloat16() else 4) * matrices + 4 * others
    assert f"weights take {num_bytes / 1e3:.1f} kB, used in float32, a token of KV cache {kv_kb} kB" in fit[2]
    assert not any(path.endswith((".safetensors", "tokenizer.json")) for path in asked)
    assert not (tmp_path / "models").exists()


def test_without_the_hub_the_doctor_says_that_it_cannot_tell(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        [found] = _diagnosed("tiny/model", tmp_path, f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert found[:2] == ["model", "failed"]
    assert "not on this disk, and the hub cannot be reached" in found[2]


def test_a_pull_that_breaks_off_says_so_and_goes_on_from_there(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    result = _pull("tiny/broken", tmp_path / "models", endpoint)
    assert result.returncode == 2
    assert "model tiny/broken: the download broke off" in result.stderr
    assert [entry.name for entry in (tmp_path / "models").iterdir()] == ["tiny--broken.partial"]
    assert asked


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("tiny/gated", "its owner asks for consent"),
        ("tiny/unknown", "unknown on the hub, or private"),
        ("tiny/bin-only", "no safetensors weights"),
        ("tiny/a--b", "no name of a model"),
    ],
)
def test_a_pull_that_the_hub_refuses_says_why_in_one_line(
    hub: tuple[str, list[str]], tmp_path: Path, name: str, reason: str
) -> None:
    result = _pull(name, tmp_path / "models", hub[0])
    assert result.returncode == 2
    assert f"model {name}" in result.stderr
    assert reason in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_hub_that_cannot_be_reached_is_reported_at_once(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        result = _pull("tiny/model", tmp_path, f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert result.returncode == 2
    assert "the hub cannot be reached" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_hub_that_never_answers_is_given_up_after_10_s(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        began = time.monotonic()
        result = _pull("tiny/model", tmp_path, f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert time.monotonic() - began < 15
    assert result.returncode == 2
    assert "the hub cannot be reached" in result.stderr
