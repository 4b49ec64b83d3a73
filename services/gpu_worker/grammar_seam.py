"""gpu_worker: what the steps need of the grammars of rows, as protocols.

    prepare the step -> begin the masks -> launch the forward pass -> wait for the masks -> sample -> tell what came

A mask depends on all tokens before it. Where plans go out ahead of results, the step before has to end first; the
forward pass runs meanwhile. An answer may get more ids than were sampled: those where its grammar leaves no choice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from services.gpu_worker.uploads import Int64s
from services.wire.steps import NewRow


@dataclass(frozen=True, slots=True)
class GrammarMasks:
    """Which ids may come next: bits [n, num_words] int32, see `bit_masks`; finishes [n], NONE or why one failed."""

    bits: npt.NDArray[np.int32]
    finishes: Int64s


class MaskJob(Protocol):
    """Masks that are being made."""

    def wait(self) -> GrammarMasks:
        """The masks, once they are there."""


class Grammars(Protocol):
    """The grammars of rows and how far their answers have come."""

    def set_up(self, new: NewRow) -> None:
        """A row whose answer has a grammar; its output so far is in its ids. One that cannot be set up fails later."""

    def release(self, row: int) -> None:
        """Nobody holds the row any more; it need not have had a grammar."""

    def release_all(self) -> None:
        """Nobody holds any row any more."""

    def begin_masks(self, rows: Sequence[int]) -> MaskJob:
        """Starts to make the masks of rows with a grammar, in this order."""

    def advance(self, rows: Sequence[int], token_ids: Sequence[int]) -> list[list[int]]:
        """Tells which id each row got; gives the ids that must follow each, mostly none."""
