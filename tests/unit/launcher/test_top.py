"""The stages of a group, from metrics that a real one gave, and where they are asked for."""

from __future__ import annotations

import io
import itertools
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from rich.live import Live
from rich.text import Text

from services.launcher.cli import main
from services.launcher.errors import CommandError
from services.launcher.http.client import Client
from services.launcher.http.server_address import ServerAddress
from services.launcher.top.command import Group, watch
from services.launcher.top.samples import Samples, Window
from services.launcher.top.stages import Stage, stages_of
from services.launcher.top.view import View
from tests.unit.launcher.openai_server import OpenAiServer, openai_server

RECORDED = (Path(__file__).parent / "recorded_metrics.txt").read_text(encoding="utf-8")


def with_values(text: str, **values: float) -> str:
    """The text with other numbers in the lines that hold these words (`stage_seconds__decode`)."""
    lines = []
    for line in text.splitlines():
        for words, value in values.items():
            if not line.startswith("#") and all(word in line for word in words.split("__")):
                line = f"{line.rsplit(' ', 1)[0]} {value}"
        lines.append(line)
    return "\n".join(lines) + "\n"


def second_worker(text: str) -> str:
    """The text with a second worker that has the same numbers."""
    lines = text.splitlines()
    copies = {line: line.replace('instance="0"', 'instance="1"') for line in lines if 'role="gpu_worker"' in line}
    return "\n".join(each for line in lines for each in (line, *([copies[line]] if line in copies else []))) + "\n"


def stages(window: Window) -> dict[str, Stage]:
    return {stage.name: stage for stage in stages_of(window)}


def test_stages_since_the_start_are_what_the_processes_counted() -> None:
    found = stages(Window(Samples(RECORDED)))
    assert list(found) == [
        "disk → memory", "decoding", "memory → device", "tokenizer", "prefill", "decode", "sampling", "output",
    ]  # fmt: skip
    decode, prefill = found["decode"], found["prefill"]
    assert (decode.hardware, decode.bound, decode.seconds, decode.num_tokens) == ("CPU", "memory", 53.860769, 229)
    assert decode.share == pytest.approx(2.753517818866854 / 53.860769)
    assert decode.per_second(decode.num_bytes) == pytest.approx(12.891758592e9 / 53.860769)
    assert prefill.num_operations == 127942820352
    assert all(stage.busy is None for stage in found.values())
    assert (found["disk → memory"].hardware, found["disk → memory"].bound) == ("disk", "file cache")
    assert (found["memory → device"].bound, found["memory → device"].share) == ("CPU", None)
    assert found["sampling"].seconds == 1.359547
    assert (found["output"].num_tokens, found["tokenizer"].num_tokens) == (256, 577)


def test_a_start_is_told_stage_by_stage_to_its_end() -> None:
    start_s = {
        "libraries": 2.5, "weights": 4.0, "compile": 16.0, "forms": 4.25, "limits": 0.5, "warm_up": 2.75,
        "recording": 0.25,
    }  # fmt: skip
    lines = [
        f'tokenway:worker_start_seconds{{instance="0",role="gpu_worker",stage="{stage}"}} {value}'
        for stage, value in start_s.items()
    ]
    found = stages(Window(Samples(RECORDED + "\n".join(lines) + "\n")))
    names = list(found)[: list(found).index("tokenizer")]
    assert names == [
        "libraries", "disk → memory", "decoding", "memory → device", "laying out", "compiling loops",
        "measuring forms", "measuring limits", "warm-up", "recording",
    ]  # fmt: skip
    assert sum(found[name].seconds for name in names) == pytest.approx(sum(start_s.values()))
    assert (found["compiling loops"].seconds, found["compiling loops"].hardware) == (16.0, "CPU")


def test_a_window_tells_what_came_in_it() -> None:
    later = with_values(
        RECORDED,
        stage_seconds__decode=55.860769, stage_bytes__decode=30.891758592e9, limit_seconds__decode__compute=1.5,
        stage_tokens__decode=329, hop_seconds_sum__tokenize=1.008254369997303,
    )  # fmt: skip
    window = Window(Samples(later), Samples(RECORDED), 4.0)
    found = stages(window)
    decode = found["decode"]
    assert (decode.bound, decode.num_tokens) == ("compute", 100)
    assert [decode.seconds, decode.busy, decode.share] == pytest.approx([2.0, 0.5, 0.75])
    assert decode.per_second(decode.num_bytes) == pytest.approx(9e9)
    assert [found["tokenizer"].busy, found["tokenizer"].share] == pytest.approx([0.25, 0.25])
    prefill = found["prefill"]
    assert (prefill.seconds, prefill.busy, prefill.share, prefill.bound) == (0.0, 0.0, None, "")
    assert prefill.per_second(prefill.num_tokens) is None


def test_a_process_that_was_started_anew_counts_from_zero() -> None:
    window = Window(Samples(with_values(RECORDED, stage_tokens__decode=7)), Samples(RECORDED), 2.0)
    assert stages(window)["decode"].num_tokens == 7


def test_the_times_of_several_workers_are_added_and_their_share_is_of_both() -> None:
    before, later = second_worker(RECORDED), second_worker(with_values(RECORDED, stage_seconds__decode=54.860769))
    window = Window(Samples(later), Samples(before), 2.0)
    decode = stages(window)["decode"]
    assert [decode.seconds, decode.busy] == pytest.approx([2.0, 0.5])
    lines = View.of("u", "m", window).lines()
    assert [line.split(":")[0] for line in lines if line.startswith("worker ")] == [
        "worker 0 on the CPU, 2 threads", "worker 1 on the CPU, 2 threads",
    ]  # fmt: skip


def test_a_gpu_gets_weights_over_a_bus_with_a_limit_of_its_own() -> None:
    text = with_values(
        RECORDED, limit_upload=50e9, load_bytes__device=20e9, load_seconds__device=0.5, load_bytes__storage=9e7
    )
    text = text.replace('device="cpu"', 'device="cuda"').replace('name="the CPU"', 'name="NVIDIA H200"')
    found = stages(Window(Samples(text)))
    moved = found["memory → device"]
    assert (moved.hardware, moved.bound) == ("PCIe", "PCIe")
    assert moved.share == pytest.approx(0.8)
    assert found["disk → memory"].bound == "disk"
    assert (found["decode"].hardware, found["sampling"].hardware, found["sampling"].bound) == (
        "NVIDIA H200", "NVIDIA H200", "",
    )  # fmt: skip


def test_lines_show_the_load_and_a_row_for_each_stage() -> None:
    lines = View.of("http://h", "m\x1b[2J", Window(Samples(RECORDED))).lines()
    assert lines[0] == "m\ufffd[2J at http://h, since the start"
    assert lines[1] == "worker 0 on the CPU, 2 threads: limits 4.7 GB/s from memory, 929 GFLOP/s of bfloat16 products"
    assert lines[2] == "requests 4 running, 0 waiting; KV pages 2% used, 2% cached of 1,024"
    rows = {line.split("  ")[0]: re.split(r" {2,}", line) for line in lines[4:]}
    assert rows["decode"][1:] == ["CPU", "memory", "53.86 s", "-", "4", "0.24", "1.2", "5%"]
    assert rows["disk → memory"][1:] == ["disk", "file cache", "0.04 s", "-", "-", "2.51", "-", "-"]
    later = View.of("http://h", "m", Window(Samples(RECORDED), Samples(RECORDED), 2.0)).lines()
    assert later[0] == "m at http://h, over 2 s"
    assert later[2].endswith("; 0.0 output tokens/s, 0.0 of prompts")


# ---------------------------------------------------------------- asking


def serving(text: str, server: OpenAiServer) -> OpenAiServer:
    server.other["/metrics"] = text
    return server


def test_a_server_is_asked_with_a_key_and_shown_as_lines_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    with openai_server() as server:
        serving(RECORDED, server)
        assert main(["top", "--url", server.url, "--api-key", "k"]) == 0
        assert server.headers[-1]["authorization"] == "Bearer k"
        assert capsys.readouterr().out.startswith(f"model-a at {server.url}, since the start\nworker 0 on ")
        assert main(["top", "--url", server.url, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["model"], found["window_s"], found["load"]["running"]) == ("model-a", None, 4)
    assert [stage["bound"] for stage in found["stages"] if stage["name"] in ("prefill", "decode")] == ["memory"] * 2
    assert found["workers"][0]["operations_per_s"] == 9.28628727155179e11


def test_what_cannot_be_shown_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def problem(*words: str) -> str:
        assert main(["top", *words]) == 2
        return capsys.readouterr().err

    assert problem("--run-dir", str(tmp_path)).startswith("tokenway: no server of this user runs here")
    (tmp_path / "control-0.sock").touch()
    assert problem("--run-dir", str(tmp_path)).startswith("tokenway: no server of this user runs here")
    assert problem("--url", "http://127.0.0.1:1").startswith("tokenway: cannot reach http://127.0.0.1:1")
    assert problem("--url", "x", "--interval", "0") == "tokenway: --interval must be between 0.1 and 3600\n"
    with openai_server() as server:
        missing = problem("--url", server.url)
        assert missing == f"tokenway: {server.url}/metrics: status 404: there is no /metrics here\n"
        serving("python_info 1\n", server)
        assert problem("--url", server.url) == "tokenway: the server's metrics are none of Tokenway's\n"
        serving("a{ 1\n", server)
        assert problem("--url", server.url).startswith("tokenway: the server's metrics are not understood: ")
        server.refusal = (401, "no")
        assert "wants a key" in problem("--url", server.url)


class Shown(list[str]):
    """What a screen was told to show."""

    def update(self, renderable: Text, *, refresh: bool) -> None:
        assert refresh
        self.append(str(renderable))


def test_a_live_view_goes_on_while_the_server_is_away() -> None:
    now_s = itertools.count(0.0, 2.0)
    shown = Shown()
    with openai_server() as server:
        serving(RECORDED, server)
        group = Group(Client(ServerAddress.parse(server.url)), now_s.__next__)

        def wait() -> None:
            if len(shown) == 1:
                serving(with_values(RECORDED, stage_tokens__decode=329), server)
            elif len(shown) == 2:
                server.refusal = (503, "starting")
            elif len(shown) == 3:
                server.refusal = None
            else:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            watch(group, group.look(), shown, wait)
    heads = [text.splitlines()[0].rsplit(", ", 1)[1] for text in shown]
    assert heads == ["since the start", "over 2 s", "over 2 s", "over 4 s"]
    assert shown[2].endswith("/metrics: status 503: starting; trying again")
    assert "trying again" not in shown[3]


def test_a_terminal_shows_the_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()

    def wait() -> None:
        raise KeyboardInterrupt

    with openai_server() as server:
        serving(RECORDED, server)
        group = Group(Client(ServerAddress.parse(server.url)))
        console = Console(file=stream, force_terminal=True, width=100)
        with pytest.raises(KeyboardInterrupt), Live(console=console, auto_refresh=False) as live:
            watch(group, group.look(), live, wait)
    assert "OF LIMIT" in stream.getvalue()
    assert max(len(line) for line in re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", stream.getvalue()).splitlines()) <= 100


def test_metrics_that_are_none_are_refused() -> None:
    with pytest.raises(CommandError, match="none of Tokenway's"):
        Samples("")
