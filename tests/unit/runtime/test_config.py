"""Settings: where a value comes from, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.runtime.config import (
    Settings,
    SettingsError,
    inherited_environment,
    load_settings,
    set_library_variable,
)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A TOML file with some settings, spelled both ways."""
    path = tmp_path / "tokenway.toml"
    path.write_text('page-size = 8\nport = 8001\nhost = "0.0.0.0"\nstrict_fields = true\n', encoding="utf-8")
    return path


def test_flags_win_over_variables_and_variables_over_the_file(config_file: Path) -> None:
    variables = {"TOKENWAY_PORT": "8002", "TOKENWAY_PAGE_SIZE": "4", "HOME": "/home/somebody"}
    settings = load_settings(["--config", str(config_file), "--page-size", "2"], variables)
    assert (settings.host, settings.port, settings.page_size) == ("0.0.0.0", 8002, 2)
    assert settings.strict_fields
    assert settings.num_tokenizers == Settings().num_tokenizers


def test_a_flag_can_switch_off_what_the_file_switches_on(config_file: Path) -> None:
    assert not load_settings(["--config", str(config_file), "--no-strict-fields"], {}).strict_fields


def test_the_model_may_be_the_first_word_or_a_flag() -> None:
    assert load_settings(["qwen3:0.6b"], {}).model == "qwen3:0.6b"
    assert load_settings(["--model", "a/b", "--port", "1"], {"TOKENWAY_MODEL": "c/d"}).model == "a/b"


def test_a_child_gets_the_same_settings_through_its_environment() -> None:
    settings = Settings(
        model="/模型/🙂", port=0, strict_fields=True, head_timeout_s=0.25, chunked_prefill_size=-1, num_tokenizers=3
    )
    assert load_settings([], settings.as_environment()) == settings


def test_a_child_inherits_no_setting_that_the_launcher_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKENWAY_PORT", "1")
    monkeypatch.setenv("HF_HOME", "/somewhere")
    environment = inherited_environment()
    assert "TOKENWAY_PORT" not in environment
    assert environment["HF_HOME"] == "/somewhere"


def test_what_a_library_is_told_is_there_for_it_and_for_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    set_library_variable("OMP_WAIT_POLICY", "PASSIVE")
    assert os.environ["OMP_WAIT_POLICY"] == inherited_environment()["OMP_WAIT_POLICY"] == "PASSIVE"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("prot = 1", "unknown setting 'prot'"),
        ("port = 1.5", "--port must be a whole number"),
        ("port = true", "--port must be a whole number"),
        ("host = 1", "--host must be text"),
        ("strict-fields = 2", "--strict-fields must be true or false"),
        ("plans-ahead = 5", "--plans-ahead must be between 0 and 4"),
        ("head-timeout-s = nan", "--head-timeout-s must be between"),
        ('log-format = "xml"', "--log-format must be one of text, json"),
        ("port = ", "cannot read settings"),
    ],
)
def test_a_bad_line_of_the_file_is_named(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=reason):
        load_settings(["--config", str(path)], {})


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("TOKENWAY_PROT", "1", "unknown setting 'prot' in the environment"),
        ("TOKENWAY_", "1", "unknown setting '' in the environment"),
        ("TOKENWAY_PORT", "", "--port must be a whole number"),
        ("TOKENWAY_STRICT_FIELDS", "maybe", "--strict-fields must be true or false"),
        ("TOKENWAY_NUM_TOKENIZERS", "0", "--num-tokenizers must be between 1 and 64"),
    ],
)
def test_a_bad_variable_is_named(name: str, value: str, reason: str) -> None:
    with pytest.raises(SettingsError, match=reason):
        load_settings([], {name: value})


def test_a_flag_is_not_taken_for_its_beginning() -> None:
    with pytest.raises(SettingsError, match="--por"):
        load_settings(["--por", "1"], {})
