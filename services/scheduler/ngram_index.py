"""scheduler: where the ids of one answer went on the last time that they ended as they do now.

A table of fixed size: the hash of each run of `length` ids leads to the place behind its last occurrence. Two runs that
meet in a slot take it from each other, so what is found is compared with the ids themselves. An id costs the same
however long the answer is. It owns no ids.

    ids     7 8 9 1 2 3 4 ... 7 8 9
                  ^ place: what may come next, as it came then
"""

from __future__ import annotations

from array import array

import numpy as np

from services.wire.columns import unpack_int32

_SLOT_BITS = 15  # 128 KiB a table; of 16,000 runs 6 in 10 are still found
_ID_BYTES = 4
_WORD = 0xFFFFFFFF
_STEP = 0x9E3779B1  # odd, 2**32 / golden ratio
_MIX = 0x85EBCA77
_MANY = 48  # so many new ids are taken in by arrays: a prompt
_MOST_AT_ONCE = 2**16


class NgramIndex:
    """Runs of `length` >= 1 ids of one request, whose ids only become more."""

    __slots__ = ("_length", "_num_indexed", "_places")

    def __init__(self, length: int) -> None:
        self._length = length
        self._places = array("i", bytes(_ID_BYTES << _SLOT_BITS))  # 0: nothing; no place is 0
        self._num_indexed = 0

    def find(self, token_bytes: bytearray) -> int:
        """The place where they went on, or 0 when they never ended like this before.

        Args:
            token_bytes: all ids so far, as an int32 column; those of the last call and what has come since.
        """
        num_tokens, length = len(token_bytes) // _ID_BYTES, self._length
        if num_tokens <= length:
            return 0
        self._take_in(token_bytes, num_tokens)
        end = num_tokens * _ID_BYTES
        newest = token_bytes[end - length * _ID_BYTES : end]
        place = self._places[_slot(newest)]
        start = (place - length) * _ID_BYTES
        return place if place and token_bytes[start : start + len(newest)] == newest else 0

    def _take_in(self, token_bytes: bytearray, num_tokens: int) -> None:
        """Notes the place behind each run that an id has followed by now."""
        length = self._length
        first = max(self._num_indexed, length)
        self._num_indexed = num_tokens
        if num_tokens - first > _MANY:
            for start in range(first, num_tokens, _MOST_AT_ONCE):
                self._take_in_many(token_bytes, start, min(start + _MOST_AT_ONCE, num_tokens))
            return
        for place in range(first, num_tokens):
            self._places[_slot(token_bytes[(place - length) * _ID_BYTES : place * _ID_BYTES])] = place

    def _take_in_many(self, token_bytes: bytearray, first: int, end: int) -> None:
        """The same for the places [first, end), with arrays."""
        ids = np.frombuffer(bytes(token_bytes[(first - self._length) * _ID_BYTES : (end - 1) * _ID_BYTES]), "<u4")
        hashes = np.zeros(end - first, dtype=np.uint32)
        for offset in range(self._length):
            hashes = hashes * np.uint32(_STEP) + ids[offset : offset + end - first]
        slots = (hashes * np.uint32(_MIX)) >> np.uint32(32 - _SLOT_BITS)
        np.frombuffer(self._places, np.int32)[slots] = np.arange(first, end, dtype=np.int32)  # of equals the last stays


def _slot(run: bytearray) -> int:
    """The slot of a run of ids, given as an int32 column."""
    value = 0
    for token_id in unpack_int32(bytes(run)):
        value = (value * _STEP + token_id) & _WORD
    return ((value * _MIX) & _WORD) >> (32 - _SLOT_BITS)
