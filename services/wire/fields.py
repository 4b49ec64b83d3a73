"""What several messages share: the types of their fields, and the checks that the columns of a batch agree.

The checks raise ProtocolError; a message calls them in its `check`, which the codec runs on both sides of a link.
"""

from __future__ import annotations

from typing import Annotated

from services.wire.columns import pack_int32, unpack_int32
from services.wire.errors import ProtocolError
from services.wire.finish import Finish
from services.wire.forms import Column, Exactly, Limit, Range

RequestId = Annotated[bytes, Exactly(16)]
RequestIds = Annotated[bytes, Column(16)]
Int32s = Annotated[bytes, Column(4, is_natural=True)]  # int32, none below 0: ids, rows, pages, counts, positions
Uint8s = Annotated[bytes, Column(1)]
Float32s = Annotated[bytes, Column(4)]  # little-endian float32; may hold -inf where a field says so
UInt31 = Annotated[int, Range(0, 2**31 - 1)]
Epoch = Annotated[int, Range(0, 2**64 - 1)]
Name = Annotated[str, Limit(128)]

_FINISH_VALUES = bytes(Finish)
_ONE = pack_int32([1])


def require_rows(num_rows: int, *columns: bytes) -> None:
    """Each column holds one 4-byte item a row."""
    num_bytes = 4 * num_rows
    for column in columns:
        if len(column) != num_bytes:
            raise ProtocolError("columns of different lengths")


def require_counts(counts: bytes, values: bytes) -> None:
    """The int32 column `counts` cuts the 4-byte items of `values` up to the last one."""
    if len(counts) == len(values) and counts == _ONE * (len(counts) // 4):  # nearly always: one value for each
        return
    total = sum(unpack_int32(counts))
    if 4 * total != len(values):
        raise ProtocolError(f"counts add up to {total}, column holds {len(values) // 4}")


def require_finishes(num_rows: int, finishes: bytes) -> None:
    """The uint8 column holds one `Finish` a row."""
    if len(finishes) != num_rows:
        raise ProtocolError("columns of different lengths")
    if finishes.translate(None, _FINISH_VALUES):
        raise ProtocolError("a finish is none of ours")


def require_logprobs(token_ids: bytes, counts: bytes, logprob_ids: bytes, logprobs: bytes) -> None:
    """The columns of log-probabilities (see `logprob_columns`) fit the ids of the batch, or are all empty."""
    if not counts and not logprob_ids and not logprobs:  # nearly always
        return
    require_rows(len(token_ids) // 4, counts)
    require_counts(counts, logprob_ids)
    require_rows(len(logprob_ids) // 4, logprobs)
