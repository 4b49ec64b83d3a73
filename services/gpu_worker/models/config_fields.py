"""gpu_worker: typed reading of a model's configuration, every error naming the file and the field."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TypeGuard

from services.model_files.errors import ModelFileError


class ConfigFields:
    """A configuration object from a file, read field by field; a JSON null counts as absent."""

    def __init__(self, path: Path, values: Mapping[str, object], prefix: str = "") -> None:
        """Wraps the values of the file at `path`; `prefix` stands before a name in messages (`rope_scaling.`)."""
        self._path = path
        self._values = values
        self._prefix = prefix

    def error(self, name: str, problem: str) -> ModelFileError:
        """An error that names the file and the field."""
        return ModelFileError(self._path, f"field {self._prefix}{name}: {problem}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def is_null(self, name: str) -> bool:
        """Whether the field is there and null, where that means something else than absent."""
        return name in self._values and self._values[name] is None

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """A whole number >= minimum; without a default the field must be there."""
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        if not _is_integer(value, minimum):
            raise self.error(name, f"must be a whole number of at least {minimum}, not {value!r}")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number > 0; without a default the field must be there."""
        value = self._values.get(name)
        if value is None:
            if default is None:
                raise self.error(name, "is missing")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
            raise self.error(name, f"must be a positive number, not {value!r}")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(name, f"must be a string, not {value!r}")
        return value

    def texts(self, name: str) -> list[str] | None:
        """A list of strings, None where the field is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(name, "must be a list of strings")
        return value

    def integers(self, name: str, minimum: int = 0) -> list[int] | None:
        """A list of whole numbers >= minimum, None where the field is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(_is_integer(item, minimum) for item in value):
            raise self.error(name, f"must be a list of whole numbers of at least {minimum}")
        return value

    def pair(self, name: str) -> tuple[int, int] | None:
        """Two whole numbers of at least 1, None where the field is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(size) is int and size >= 1 for size in value):
            raise self.error(name, f"must be two whole numbers of at least 1, not {value!r}")
        return value[0], value[1]

    def has_same(self, name: str, other: ConfigFields) -> bool:
        """Whether another object has the same value of a field, or lacks it too."""
        return self._values.get(name) == other._values.get(name)

    def group(self, name: str) -> ConfigFields | None:
        """A nested object, None where the field is absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(name, f"must be an object, not {value!r}")
        return ConfigFields(self._path, value, f"{self._prefix}{name}.")

    def names(self) -> list[str]:
        """Names of the fields that are there and not null."""
        return [name for name, value in self._values.items() if value is not None]


def _is_integer(value: object, minimum: int) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= minimum
