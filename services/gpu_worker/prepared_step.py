"""gpu_worker: a plan that has been applied and laid out, ready to run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from services.gpu_worker.proposals import Proposals
from services.gpu_worker.row_lines import Bools
from services.gpu_worker.step_inputs import StepInputs
from services.gpu_worker.uploads import Int64s


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step as its result names them; later plans change the state, not this.

    Attributes:
        rows: [num_rows] their numbers.
        request_ids, attempts: who held them.
        first_indexes: [num_rows] output index of the token to be sampled.
        starts: [num_rows] first position computed.
        samples: [num_rows] whether the plan asks for a token.
        is_refused: [num_rows] whether the request holds ids that the model does not have.
    """

    rows: Int64s
    request_ids: list[bytes]
    attempts: list[int]
    first_indexes: Int64s
    starts: Int64s
    samples: Bools
    is_refused: list[bool]


@dataclass(frozen=True, slots=True)
class Spans:
    """What each row of a step computes of its own tokens, known on the host: [num_rows] each.

    Attributes:
        places: places in the step.
        rows: the rows that they are.
        starts, ends: positions [start, end).
        offsets: where the row's tokens begin among all of the step.
    """

    places: Int64s
    rows: Int64s
    starts: Int64s
    ends: Int64s
    offsets: Int64s

    @classmethod
    def of(cls, rows: Int64s, starts: Int64s, counts: Int64s, num_proposed: Int64s | None) -> Spans:
        """Those of a step whose rows compute `counts` tokens >= 1, some of them proposals, which come last."""
        places = np.arange(len(rows))
        ends = starts + counts
        if num_proposed is not None:
            ends -= num_proposed
        is_one_each = sum(counts.tolist()) == len(rows)
        return cls(places, rows, starts, ends, places if is_one_each else np.cumsum(counts) - counts)

    def followed_by(self, num_proposed: Int64s, token_ids: Int64s) -> Proposals:
        """The proposals that come behind the rows' own tokens.

        Args:
            num_proposed: [num_rows] of each row.
            token_ids: all of them, row after row.
        """
        places = np.repeat(np.arange(len(self.rows)), num_proposed)
        nth = np.arange(len(places)) - np.repeat(np.cumsum(num_proposed) - num_proposed, num_proposed)
        own_ends = self.offsets + self.ends - self.starts
        return Proposals(places, self.rows[places], self.ends[places] + nth + 1, token_ids, own_ends[places] + nth)

    def alone(self, place: int) -> Spans:
        """What is left when the row at that place is run by itself."""
        one = slice(place, place + 1)
        zero = np.zeros(1, dtype=np.int64)
        return Spans(self.places[one], self.rows[one], self.starts[one], self.ends[one], zero)


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A plan, laid out.

    Attributes:
        inputs: for the model; the logits of every row's last own token are asked for, sampling or not, because they
            show whether the row is still finite. Those of proposals come behind them.
        spans: the same for the host.
        rows: for the result.
        pages_to_clear: pages that a failed row has left, to be cleared before this step runs.
        has_grammar: whether any row's answer has one.
        proposals: ids to be verified, which some rows compute behind their own; None: no row does.
    """

    inputs: StepInputs
    spans: Spans
    rows: StepRows
    pages_to_clear: list[int]
    has_grammar: bool
    proposals: Proposals | None = None

    def alone(self, place: int) -> PreparedStep:
        """The step of one of its rows: the same tokens go to the same slots. Proposals are computed, not verified."""
        inputs = self.inputs
        start, end = inputs.query_starts[place : place + 2]
        return replace(
            self,
            inputs=StepInputs(
                input_ids=inputs.input_ids[start:end],
                positions=inputs.positions[start:end],
                slot_mapping=inputs.slot_mapping[start:end],
                page_table=inputs.page_table[place : place + 1],
                query_lengths=inputs.query_lengths[place : place + 1],
                context_lengths=inputs.context_lengths[place : place + 1],
                sample_indices=inputs.sample_indices[place : place + 1] - start,
            ),
            spans=self.spans.alone(place),
            proposals=None,
        )
