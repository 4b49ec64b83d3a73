"""Every setting is documented, bounded, and can be set in all three ways."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from services.runtime.config import SECRETS, Settings, SettingsError, add_flags, load_settings, values_of
from services.runtime.setting_ranges import RANGES as ROWS

FIELDS = {field.name: field for field in dataclasses.fields(Settings)}
RANGES = {name: (low, high) for name, low, high in ROWS}


def with_value(name: str, value: Any) -> Settings:
    return dataclasses.replace(Settings(), **{name: value})


def other_value(field: dataclasses.Field[object]) -> object:
    """A legal value that is not the default."""
    if field.metadata["choices"]:
        return next(choice for choice in field.metadata["choices"] if choice != field.default)
    if field.name in RANGES:
        low, high = RANGES[field.name]
        return type(field.default)(high if low == field.default else low)  # type: ignore[call-arg]
    return (not field.default) if isinstance(field.default, bool) else "other"


def test_every_setting_has_a_line_of_help_and_appears_in_it() -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = parser.format_help()
    for field in FIELDS.values():
        assert len(field.metadata["help"]) > 5
        assert "--" + field.name.replace("_", "-") in text


def test_every_number_has_a_range_that_its_default_is_in() -> None:
    numbers = {name for name, field in FIELDS.items() if field.type in ("int", "float")}
    assert {name for name, _, _ in ROWS} == numbers
    assert all(low <= getattr(Settings(), name) <= high for name, low, high in ROWS)


@pytest.mark.parametrize("name", FIELDS)
def test_every_setting_can_be_a_flag_a_variable_and_a_line_of_the_file(name: str, tmp_path: Path) -> None:
    value = other_value(FIELDS[name])
    text = str(value).lower() if isinstance(value, bool) else str(value)
    flag = "--" + name.replace("_", "-")
    path = tmp_path / "tokenway.toml"
    path.write_text(f"{name} = {repr(value) if isinstance(value, str) else text}\n")
    expected = with_value(name, value)
    arguments = [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, text]
    assert load_settings(arguments, {}) == expected
    assert load_settings([], {f"TOKENWAY_{name.upper()}": text}) == expected
    assert load_settings(["--config", str(path)], {}) == expected
    assert load_settings([], expected.as_environment()) == expected


@pytest.mark.parametrize(("name", "low", "high"), ROWS)
def test_every_bound_is_kept(name: str, low: float, high: float) -> None:
    for value in (low, high):
        assert getattr(with_value(name, value), name) == value
    for value in (low - 1, high + 1, float("nan")):
        with pytest.raises(SettingsError, match=name.replace("_", "-")):
            with_value(name, value)


@pytest.mark.parametrize("text", ["inf", "-inf", "nan", "1e400", "[1]", "{a = 1}", "1979-05-27", "'1.5'", "''"])
def test_values_that_are_no_number_are_refused_as_one(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tokenway.toml"
    path.write_text(f"port = {text}\n")
    with pytest.raises(SettingsError, match="--port must be"):
        load_settings(["--config", str(path)], {})


@pytest.mark.parametrize("name", ["a/b", "../x", "a b", "ü", "x" * 65, "a\n"])
def test_instance_names_fit_into_file_names(name: str) -> None:
    with pytest.raises(SettingsError, match="--instance"):
        Settings(instance=name)


def test_a_model_given_twice_is_an_error() -> None:
    with pytest.raises(SettingsError, match="given twice: 'a' and --model 'b'"):
        load_settings(["a", "--model", "b"], {})


def test_settings_never_change() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().port = 1  # type: ignore[misc]


def test_a_list_setting_can_be_repeated_listed_and_joined(tmp_path: Path) -> None:
    path = tmp_path / "tokenway.toml"
    path.write_text('api-key = ["one", "two"]\n')
    expected = ["one", "two"]
    for settings in (
        load_settings(["--api-key", "one", "--api-key", "two"], {}),
        load_settings(["--api-key=one,two"], {}),
        load_settings([], {"TOKENWAY_API_KEY": "one, two"}),
        load_settings(["--config", str(path)], {}),
    ):
        assert values_of(settings.api_key) == expected
    path.write_text("model = ['one', 'two']\n")
    with pytest.raises(SettingsError, match="--model must be text"):
        load_settings(["--config", str(path)], {})


def test_a_secret_is_in_no_text(tmp_path: Path) -> None:
    settings = load_settings(["--api-key", "sk-hidden", "--admin-key", "sk-hidden"], {})
    assert "sk-hidden" not in repr(settings)
    assert set(SECRETS) == {"api_key", "admin_key"}
    assert not any(getattr(settings.without_secrets(), name) for name in SECRETS)
    assert dataclasses.replace(settings.without_secrets(), api_key="sk-hidden", admin_key="sk-hidden") == settings
    path = tmp_path / "tokenway.toml"
    path.write_text("api-key = ['sk-hidden', 1]\n")
    with pytest.raises(SettingsError) as caught:
        load_settings(["--config", str(path)], {})
    assert "sk-hidden" not in str(caught.value)
