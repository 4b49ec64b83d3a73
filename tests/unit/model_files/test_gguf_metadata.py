"""The light GGUF reader agrees with the gguf package, and refuses damaged headers instead of guessing."""

from __future__ import annotations

import struct
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.model_files.errors import ModelFileError
from services.model_files.gguf_metadata import read_gguf_header
from tests.unit.model_files.gguf_files import TINY_LLAMA, write_gguf

_EVERY_KIND: dict[str, object] = TINY_LLAMA | {
    "a.text": "你好 🙂",
    "a.empty": "",
    "a.flag": True,
    "a.texts": ["x", "é", ""],
    "a.ints": [1, -2, 3],
    "a.floats": [0.5, -1.5],
}


@pytest.fixture
def small_file(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "small.gguf", metadata=_EVERY_KIND, tensors={"t": np.ones((3, 32), np.float32)})


def test_reads_what_the_gguf_package_reads(small_file: Path) -> None:
    header, reference = read_gguf_header(small_file), gguf.GGUFReader(small_file)
    fields = {name: field.contents() for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata.keys() == fields.keys()
    for name, value in fields.items():
        assert header.metadata[name] == (pytest.approx(value) if isinstance(value, float) else value), name
    tensors = {tensor.name: (tuple(tensor.shape), int(tensor.tensor_type)) for tensor in reference.tensors}
    assert {name: (entry.shape, entry.ggml_type) for name, entry in header.tensors.items()} == tensors
    assert header.data_start + header.tensors["t"].offset == reference.tensors[0].data_offset


def test_a_float32_reads_as_the_decimal_that_was_meant(small_file: Path) -> None:
    assert read_gguf_header(small_file).metadata["llama.attention.layer_norm_rms_epsilon"] == 1e-5


def test_typed_access_names_the_field(small_file: Path) -> None:
    header = read_gguf_header(small_file)
    assert (header.text("a.text"), header.flag("a.flag"), header.integers("a.ints")) == ("你好 🙂", True, [1, -2, 3])
    assert (header.text("none"), header.number("llama.block_count")) == (None, 2.0)
    with pytest.raises(ModelFileError, match=r"small\.gguf: field a\.flag: expected int, found bool"):
        header.integer("a.flag")
    with pytest.raises(ModelFileError, match=r"field a\.ints: expected a list of str"):
        header.texts("a.ints")
    with pytest.raises(ModelFileError, match=r"field a\.text: expected a list, found str"):
        header.floats("a.text")


def test_wgt_02_a_header_cut_anywhere_is_refused(small_file: Path, tmp_path: Path) -> None:
    whole = small_file.read_bytes()
    end = read_gguf_header(small_file).data_start
    cut = tmp_path / "cut.gguf"
    for length in range(end - 31):
        cut.write_bytes(whole[:length])
        with pytest.raises(ModelFileError, match=r"cut\.gguf: (.* runs over the end of the file|the file is empty)"):
            read_gguf_header(cut)


def test_what_a_damaged_file_puts_into_a_name_stays_on_the_line() -> None:
    error = ModelFileError(Path("a.gguf"), "field x\n2026 E fake\x1b[31m runs over, 你好")
    assert str(error) == "a.gguf: field x\\n2026 E fake\\x1b[31m runs over, 你好"


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 1000), value=st.binary(min_size=1, max_size=8))
def test_a_damaged_header_is_refused_or_read_never_a_crash(small_file: Path, position: int, value: bytes) -> None:
    damaged = bytearray(small_file.read_bytes())
    damaged[position : position + len(value)] = value
    path = small_file.with_name("damaged.gguf")
    path.write_bytes(damaged)
    problem = _problem(path)
    assert problem is None or problem.startswith(str(path))
    assert problem is None or "\n" not in problem


def _problem(path: Path) -> str | None:
    try:
        read_gguf_header(path)
    except ModelFileError as error:
        return str(error)
    return None


def _header(version: int = 3, num_tensors: int = 0, fields: bytes = b"", num_fields: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + fields


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "the file is empty"),
        (b"PK\x03\x04" + bytes(100), r"bad\.gguf: is not a GGUF file: it begins with b'PK.+x04', not with b'GGUF'$"),
        (b"no", r"bad\.gguf: is not a GGUF file: it begins with b'no', not with b'GGUF'$"),
        (b"GG", r"bad\.gguf: the beginning runs over the end of the file: it is truncated or damaged$"),
        (_header(version=1), "version 1 GGUF is not supported"),
        (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian GGUF is not supported"),
        (_header(num_fields=2**60), "metadata field 0 of 1152921504606846976 runs over the end"),
        (_header(fields=struct.pack("<Q", 2**63) + b"key", num_fields=1), "metadata field 0 of 1 runs over the end"),
        (_header(fields=struct.pack("<Q1sI", 1, b"k", 99), num_fields=1), "field k has the unknown value type 99"),
        (_header(fields=struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**50), num_fields=1), "field k runs over the end"),
        (_header(fields=struct.pack("<Q1sIIQ", 1, b"k", 9, 9, 1), num_fields=1), "field k is an array of the unsupp"),
        (
            _header(fields=struct.pack("<Q1sIQ2s", 1, b"k", 8, 2, b"\xff\xfe"), num_fields=1),
            "field k is not valid UTF-8",
        ),
        (_header(fields=struct.pack("<Q1sI?", 1, b"k", 7, True) * 2, num_fields=2), "field k appears twice"),
        (_header(num_tensors=1, fields=struct.pack("<Q1sI", 1, b"t", 9)), "tensor t has 9 dimensions"),
    ],
)
def test_damaged_headers_name_where_reading_stopped(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    with pytest.raises(ModelFileError, match=message):
        read_gguf_header(path)
