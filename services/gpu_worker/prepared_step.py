"""gpu_worker: a plan that has been applied and laid out, ready to run."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from torch import Tensor

from services.gpu_worker.sampler import DrawnRows
from services.gpu_worker.step_inputs import StepInputs
from services.gpu_worker.uploads import Int64s

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step as its result names them; later plans change the state, not this.

    Attributes:
        rows: [num_rows] their numbers.
        request_ids, attempts: who held them.
        first_indexes: [num_rows] output index of the token to be sampled.
        starts: [num_rows] first position computed.
        samples: [num_rows] whether a token is sampled.
        is_refused: [num_rows] whether the request holds ids that the model does not have.
    """

    rows: Int64s
    request_ids: list[bytes]
    attempts: Int64s
    first_indexes: Int64s
    starts: Int64s
    samples: Bools
    is_refused: Bools


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A plan, laid out.

    Attributes:
        inputs: for the model; the logits of every row's last token are asked for, sampling or not, because they show
            whether the row is still finite.
        groups: which rows draw, for the sampler.
        sampling_places: [n] int64 on the device, rows of the logits whose token is kept.
        sampling_rows: [n] int64 on the device, the rows that these are.
        rows: for the result.
        pages_to_clear: pages that a failed row has left, to be cleared before this step runs.
    """

    inputs: StepInputs
    groups: list[DrawnRows]
    sampling_places: Tensor
    sampling_rows: Tensor
    rows: StepRows
    pages_to_clear: list[int]

    def alone(self, place: int) -> PreparedStep:
        """The step of one of its rows: the same tokens go to the same slots. On a CUDA device this waits for it."""
        inputs = self.inputs
        start, end = inputs.query_starts[place : place + 2]
        groups = [group.select((group.rows == place).nonzero().flatten()) for group in self.groups]
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
            groups=[replace(group, rows=group.rows - place) for group in groups],
        )
