"""gpu_worker: whether the rows of a plan continue what is held here. Pure: it decides, and changes nothing."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from services.gpu_worker.row_lines import Bools
from services.gpu_worker.uploads import Int64s

NOT_STARTED = -1
"""`num_computed` of a row whose first start position is still to come."""


class PlanError(Exception):
    """A plan that does not continue what this worker holds: the scheduler's fault, and the end of this process."""


@dataclass(frozen=True, slots=True)
class PlannedRows:
    """The rows of a plan and what is held of them: [num_rows] each.

    Attributes:
        rows: their numbers.
        starts, ends: positions [start, end) to compute, proposals apart.
        samples: whether a token is asked for.
        num_tokens: tokens that there are; num_known of them known on the host.
        num_known: see there.
        num_computed: tokens computed before this plan.
        num_page_tokens: tokens that the pages have room for.
        latest_starts: where a new row has to begin at the latest, because more is wanted of its prompt.
        has_grammar: whether the answer has one, so that it may have got more ids than the plan knew of.
        num_proposed: proposals to compute behind the end.
        can_verify: whether a token of the row depends on nothing but the logits of its place.
        is_open: whether what came of earlier proposals has not been told.
    """

    rows: Int64s
    starts: Int64s
    ends: Int64s
    samples: Bools
    num_tokens: Int64s
    num_known: Int64s
    num_computed: Int64s
    num_page_tokens: Int64s
    latest_starts: Int64s
    has_grammar: Bools
    num_proposed: Int64s
    can_verify: Bools
    is_open: Bools


def check_rows(plan: PlannedRows) -> None:
    """PlanError, naming a row and what is wrong with it, unless all of them can be run."""
    is_new = plan.num_computed == NOT_STARTED
    is_on_device = plan.starts >= plan.num_known
    rules = {
        "computes nothing": plan.ends <= plan.starts,
        "does not start where it left off": ~is_new & (plan.starts != plan.num_computed),
        "starts behind what is wanted of its prompt": is_new & (plan.starts > plan.latest_starts),
        "computes tokens that it does not have": plan.ends > plan.num_tokens,
        "has too few pages": plan.ends + plan.num_proposed > plan.num_page_tokens,
        "samples before its last token": plan.samples & (plan.ends != plan.num_tokens) & ~plan.has_grammar,
        "needs ids that are known nowhere": (plan.ends > plan.num_known)
        & ~(is_on_device & (plan.starts == plan.num_tokens - 1)),
        "has proposals that cannot be verified": (plan.num_proposed > 0) & ~(plan.samples & plan.can_verify),
        "runs before its proposals are verified": plan.is_open,
    }
    broken = np.array(list(rules.values()))
    if broken.any():
        rule, place = (int(index) for index in np.argwhere(broken)[0])
        raise PlanError(
            f"row {plan.rows[place]} {list(rules)[rule]}: tokens [{plan.starts[place]}, {plan.ends[place]}) of "
            f"{plan.num_tokens[place]}, {plan.num_computed[place]} computed"
        )


def only_go_on(plan: PlannedRows) -> bool:
    """Whether each row, none of which has proposals, computes its last token behind all others: no rule is broken then.

    As nearly always; the rules themselves take several times as long.
    """
    is_last = (plan.starts == plan.num_computed) & (plan.ends == plan.num_tokens) & (plan.ends - plan.starts == 1)
    return bool((is_last & (plan.ends <= plan.num_page_tokens) & ~plan.is_open).all())
