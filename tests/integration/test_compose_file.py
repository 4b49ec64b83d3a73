"""What compose.yaml promises, held without an engine: one door, nobody privileged, each image its role alone."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from services.runtime.config import Settings, load_settings
from services.wire.members import Role

_ROOT = Path(__file__).parents[2]
_ROLES = [str(role) for role in Role]
_SHARED = {
    "services/__init__.py",
    "services/py.typed",
    "services/wire",
    "services/runtime",
    "services/model_files",  # the launcher reads a model's files before it starts one
    "services/launcher",
}


def _services() -> dict[str, dict[str, Any]]:
    text = (_ROOT / "compose.yaml").read_text(encoding="utf-8")
    services: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return services


def _stages() -> dict[str, str]:
    """The lines of each stage of the Dockerfile."""
    text = (_ROOT / "Dockerfile").read_text(encoding="utf-8")
    parts = re.split(r"^FROM \S+ AS (\w+)$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_the_proxy_alone_publishes_a_port_and_only_on_the_loopback_address_by_default() -> None:
    published = {name: service["ports"] for name, service in _services().items() if "ports" in service}
    watching = {"grafana": ["${BIND_ADDRESS:-127.0.0.1}:${GRAFANA_PORT:-3000}:3000"]}  # in its own profile
    assert published == {"proxy": ["${BIND_ADDRESS:-127.0.0.1}:${PORT:-8000}:8000"]} | watching


def test_no_service_can_gain_a_privilege_or_write_outside_its_temporary_folders() -> None:
    for name, service in _services().items():
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["read_only"], name
        assert not {"privileged", "network_mode", "pid", "ipc", "cap_add"} & set(service), name


def test_the_roles_have_no_way_out_of_their_network() -> None:
    compose = yaml.safe_load((_ROOT / "compose.yaml").read_text(encoding="utf-8"))
    assert compose["networks"]["pipeline"]["internal"]
    assert all(_services()[role]["networks"] == ["pipeline"] for role in _ROLES)


@pytest.mark.parametrize("role", _ROLES)
def test_a_role_reads_its_weights_only_and_may_take_its_time_to_drain(role: str) -> None:
    service = _services()[role]
    assert all(volume.endswith(":ro") for volume in service.get("volumes", []))
    assert int(service["stop_grace_period"].removesuffix("s")) > Settings().drain_timeout_s + 5
    assert service["restart"] == "on-failure"
    assert service["init"]
    assert service["build"]["target"] == role


def _by_default(value: str) -> str:
    """What a variable is when nobody sets the one that it is taken from."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", value)


def test_every_variable_of_the_roles_is_a_setting() -> None:
    for role in _ROLES:
        variables = _services()[role]["environment"]
        load_settings([], {name: _by_default(str(value)) for name, value in variables.items()})
    load_settings([], dict(re.findall(r"(TOKENWAY_\w+)=(\S+)", _stages()["base"])))


def test_the_images_that_are_not_built_here_have_a_version() -> None:
    images = [service["image"] for service in _services().values() if "image" in service]
    assert images
    assert all(re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", image) for image in images)


def test_a_role_s_image_holds_the_code_and_the_packages_of_that_role_only() -> None:
    stages = _stages()
    assert set(re.findall(r"services/\S+", stages["shared"])) >= _SHARED
    for role in _ROLES:
        copied = {folder.rsplit("/", 1)[-1] for folder in re.findall(r"COPY services/\w+ (services/\w+)", stages[role])}
        assert copied == {role}
        assert f"'/build[{role.replace('_', '-')}]'" in stages[role]
        assert "USER tokenway" in stages[role]
        assert f'ENTRYPOINT ["tokenway", "serve", "--role", "{role}"]' in stages[role]
    assert "HEALTHCHECK" in stages["base"]


def test_the_gpu_file_adds_a_device_and_the_setting_that_uses_it() -> None:
    gpu = yaml.safe_load((_ROOT / "compose.gpu.yaml").read_text(encoding="utf-8"))["services"]
    assert list(gpu) == ["gpu_worker"]
    assert load_settings([], gpu["gpu_worker"]["environment"]).device == "cuda"
    (device,) = gpu["gpu_worker"]["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
