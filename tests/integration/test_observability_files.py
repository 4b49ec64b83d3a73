"""The dashboard and what feeds it: every metric asked for exists, every file named is mounted, compose takes it all."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.runtime.metric_texts import TEXTS
from tests.architecture.markdown_tables import table_after

_ROOT = Path(__file__).parents[2]
_METRIC = re.compile(r"tokenway:(\w+)")
_ENDINGS = {"counter": ("_total",), "gauge": ("",), "histogram": ("_bucket", "_sum", "_count")}
_DASHBOARD = _ROOT / "deploy/grafana/dashboards/tokenway.json"


def _yaml(name: str) -> Any:
    return yaml.safe_load((_ROOT / name).read_text(encoding="utf-8"))


def _panels() -> list[dict[str, Any]]:
    panels: list[dict[str, Any]] = json.loads(_DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return panels


def _kinds() -> dict[str, str]:
    """The kind of every metric, by docs/operations.md, which is held against the code."""
    document = (_ROOT / "docs/operations.md").read_text(encoding="utf-8")
    sections = document.split("\n### Of the ")[1:]
    rows = [row for section in sections for row in table_after(section, "| name | kind | what |")]
    return {row[0].strip("`"): row[1] for row in rows}


def test_every_metric_of_the_dashboard_exists_and_is_asked_for_by_its_full_name() -> None:
    kinds = _kinds()
    assert set(kinds) == set(TEXTS)
    full_names = {name + ending for name, kind in kinds.items() for ending in _ENDINGS[kind]}
    asked = {
        name for panel in _panels() for target in panel.get("targets", []) for name in _METRIC.findall(target["expr"])
    }
    assert asked - full_names == set()
    assert len(asked) > 30


def test_the_dashboard_shows_what_an_operator_asks_first() -> None:
    asked = " ".join(target["expr"] for panel in _panels() for target in panel.get("targets", []))
    for name in (
        "http_requests", "time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds",
        "request_queue_seconds", "hop_seconds", "scheduler_kv_pages_cached", "scheduler_cached_tokens",
        "scheduler_retracted", "worker_step_seconds", "tokenizer_outbox_frames",
    ):  # fmt: skip
        assert f"tokenway:{name}" in asked


def test_panels_are_told_apart_and_none_lies_on_another() -> None:
    panels = _panels()
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        own = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not own & cells, panel["title"]
        assert max(x for x, _ in own) < 24
        cells |= own


def test_parentheses_of_every_query_are_closed() -> None:
    for panel in _panels():
        for target in panel.get("targets", []):
            for opening, closing in ("()", "{}", "[]"):
                assert target["expr"].count(opening) == target["expr"].count(closing), target["expr"]


def test_the_data_source_is_the_one_that_the_panels_name() -> None:
    (source,) = _yaml("deploy/grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    named = {target["datasource"]["uid"] for panel in _panels() for target in panel.get("targets", [])}
    assert named == {source["uid"]}
    assert source["url"] == "http://prometheus:9090"


def test_prometheus_asks_the_proxy_and_keeps_the_labels_of_the_group() -> None:
    (job,) = _yaml("deploy/prometheus.yml")["scrape_configs"]
    assert job["honor_labels"]
    assert job["static_configs"] == [{"targets": ["proxy:8000"]}]


def test_every_file_that_the_services_mount_is_there_and_used() -> None:
    services = _yaml("compose.yaml")["services"]
    mounts = [volume for name in ("prometheus", "grafana") for volume in services[name]["volumes"]]
    files = [volume.split(":") for volume in mounts if volume.startswith("./")]
    assert all((_ROOT / source).exists() and mode == "ro" for source, _, mode in files)
    (provider,) = _yaml("deploy/grafana/provisioning/dashboards/tokenway.yaml")["providers"]
    assert provider["options"]["path"] in [target for _, target, _ in files]
    home = services["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/{_DASHBOARD.name}"


def test_watching_is_a_profile_of_its_own_and_nobody_can_log_in() -> None:
    services = _yaml("compose.yaml")["services"]
    in_profile = {name for name, service in services.items() if "profiles" in service}
    assert in_profile == {"prometheus", "grafana"}
    assert all(services[name]["profiles"] == ["observability"] for name in in_profile)
    assert services["prometheus"]["networks"] == ["pipeline"]
    environment = services["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert (environment["GF_AUTH_DISABLE_LOGIN_FORM"], environment["GF_AUTH_BASIC_ENABLED"]) == ("true", "false")


@pytest.mark.compose
def test_compose_takes_the_files() -> None:
    program = shutil.which("docker-compose")
    assert program is not None
    command = [program, "--profile", "observability", "config"]
    found = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert set(yaml.safe_load(found.stdout)["services"]) == set(_yaml("compose.yaml")["services"])
