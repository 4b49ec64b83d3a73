"""gpu_worker: sets of token ids as packed bits, and what is taken from the logits of all other ids.

Bit i % 32 of word i // 32 says that id i is in the set. Grammars and lists of allowed ids use the same form: a set of
150,000 ids is 19 kB, and what a row uploads in a step.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from services.gpu_worker.uploads import Int64s

Int32s = npt.NDArray[np.int32]
_MAX_BLOCK = 2**22  # logits changed at once: bounds the scratch memory to 16 MiB


def num_words(vocab_size: int) -> int:
    """Words of a set."""
    return -(-vocab_size // 32)


def pack_ids(ids: Int64s, vocab_size: int) -> Int32s:
    """The set of these ids, each in [0, vocab_size): [num_words]."""
    is_member = np.zeros(32 * num_words(vocab_size), dtype=np.uint8)
    is_member[ids] = 1
    return np.packbits(is_member, bitorder="little").view("<i4").astype(np.int32)


def take_from_others(logits: Tensor, logit_rows: Tensor, bits: Tensor, amount: float) -> None:
    """Takes `amount` from the logits of all ids that are not in their row's set.

    Args:
        logits: [num_rows, vocab_size] float32; changed.
        logit_rows: [n] int64, which rows; none twice.
        bits: [n, num_words] int32, their sets.
        amount: > 0, may be infinite.
    """
    vocab_size = logits.shape[1]
    table = _taken_by_byte(logits.device, amount)
    rows_at_once = max(1, _MAX_BLOCK // vocab_size)
    for rows, sets in zip(torch.split(logit_rows, rows_at_once), torch.split(bits, rows_at_once), strict=True):
        # 8 ids for each byte of the sets, looked up; little-endian words, so bytes are in the order of ids.
        taken = functional.embedding(sets.contiguous().view(torch.uint8).to(torch.int32), table)
        logits.index_add_(0, rows, taken.flatten(1)[:, :vocab_size])


@cache
def _taken_by_byte(device: torch.device, amount: float) -> Tensor:
    """What a byte of a set adds to the logits of its 8 ids: [256, 8] float32."""
    is_member = (torch.arange(256, device=device)[:, None] >> torch.arange(8, device=device)) & 1
    return torch.zeros((256, 8), device=device).masked_fill_(is_member == 0, -amount)
