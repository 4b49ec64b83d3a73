"""gpu_worker: ids that a plan proposes for some of its rows, and which of them stand.

    row's own tokens          proposals
    [ ... computed )[ t ]  [ p0  p1  p2 ]        computed together, each behind the ones before it
    sampled after       s0   s1  s2  s3          p0 stands if it is s0; then p1 if it is s1; ...

What a row gets are the ids sampled behind what stands, so they are those that it would get one by one: a token is a
function of (seed, choice, position, logits). The logits of proposals come behind those of the rows' own last tokens.
Pure: everything here lies on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from services.gpu_worker.uploads import Int64s, int64_column
from services.wire.steps import StepPlan


@dataclass(frozen=True, slots=True)
class Proposals:
    """The proposals of a step, one row's after the other's: [n] each, n >= 1.

    Attributes:
        places: places of their rows in the step.
        rows: the rows that they are.
        positions: where in the row the token is that is sampled after the proposal.
        token_ids: the proposed ids.
        offsets: where they stand among all tokens of the step.
    """

    places: Int64s
    rows: Int64s
    positions: Int64s
    token_ids: Int64s
    offsets: Int64s

    def by_place(self) -> Iterator[tuple[int, slice]]:
        """The place of each row that has some, and where in the columns these are."""
        places, starts, counts = np.unique(self.places, return_index=True, return_counts=True)
        for place, start, count in zip(places.tolist(), starts.tolist(), counts.tolist(), strict=True):
            yield place, slice(start, start + count)


@dataclass(frozen=True, slots=True)
class Verified:
    """What came of the proposals of a step.

    Attributes:
        followers: by place in the step, the ids that a row gets behind the one picked; of rows where any do.
        spoiled_slots: slots of the pool that a proposal without usable logits may have left something in that is not
            finite, and that count as empty.
    """

    followers: dict[int, list[int]]
    spoiled_slots: list[int]


def proposal_counts(plan: StepPlan) -> Int64s | None:
    """[num_rows] how many of each row's tokens are proposed; None: none are."""
    return int64_column(plan.proposal_counts) if plan.proposal_counts else None


def followers(proposed: list[int], first_id: int, sampled: list[int], failed: list[bool]) -> list[int]:
    """The ids that a row gets behind its first one.

    Args:
        proposed: its proposals.
        first_id: sampled behind the row's own last token.
        sampled: the ids sampled behind each proposal.
        failed: where the logits were of no use. A proposal before such a place stands no more: the row computes it as
            its own token next, and fails by it then.
    """
    ids: list[int] = []
    newest = first_id
    for proposal, token_id, is_failed in zip(proposed, sampled, failed, strict=False):  # sampled: of all or of none
        if proposal != newest or is_failed:
            break
        ids.append(token_id)
        newest = token_id
    return ids
