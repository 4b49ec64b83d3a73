"""The examples in docs/scheduling.md and docs/kv-cache.md are what the scheduler's core does."""

from __future__ import annotations

from pathlib import Path

from services.scheduler.admission import CoreLimits
from services.scheduler.core import Core
from services.scheduler.proposer import SpeculationLimits
from services.scheduler.radix_cache import Node
from services.scheduler.request import Request
from services.wire.columns import pack_int32, unpack_int32
from services.wire.request_params import SamplingParams, TextParams
from services.wire.requests import Submit
from services.wire.steps import StepPlan, StepResult
from tests.architecture.markdown_tables import table_after

DOCS = Path(__file__).parents[2] / "docs"


def new_core(page_size: int, plans_ahead: int, speculation: SpeculationLimits | None = None) -> Core:
    sizes = CoreLimits(
        num_pages=8, page_size=page_size, max_model_len=64, vocab_size=1000, logits_width=1000, max_rows=4,
        token_budget=20, chunk_tokens=16, max_waiting=8, plans_ahead=plans_ahead, speculation=speculation,
    )  # fmt: skip
    return Core(sizes, epoch=1)


def submit(core: Core, number: int, prompt: list[int], max_tokens: int) -> Request:
    message = Submit(
        request_id=bytes([number]) * 16,
        attempt=0,
        prompt_token_ids=pack_int32(prompt),
        output_token_ids=b"",
        sampling=SamplingParams(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, choice=0),
        text=TextParams(stop=(), include_stop_str_in_output=False, skip_special_tokens=True, min_tokens=0),
        max_tokens=max_tokens,
        stop_token_ids=b"",
        group_id=bytes([number]) * 16,
        tenant="default",
        cache_root=b"",
        priority=0,
        deadline_ms=0,
    )
    return core.submit(message)


def answer(core: Core, plan: StepPlan, request: Request, *token_ids: int) -> None:
    """Gives the core the result of a plan with one row."""
    num_ids = plan.samples.count(1)
    result = StepResult(
        epoch=plan.epoch,
        step=plan.step,
        rows=plan.rows * num_ids,
        request_ids=request.request_id * num_ids,
        attempts=pack_int32([0] * num_ids),
        first_indexes=pack_int32([request.num_output] * num_ids),
        counts=pack_int32([len(token_ids)] * num_ids),
        token_ids=pack_int32(token_ids * num_ids),
        finishes=bytes(num_ids),
        forward_us=1,
        step_us=1,
    )
    core.apply_result(result)


def planned(core: Core) -> StepPlan:
    plan = core.plan_step()
    assert plan is not None
    return plan


def test_the_example_of_plans_ahead_is_what_the_core_does() -> None:
    core = new_core(page_size=16, plans_ahead=1)
    request = submit(core, 1, list(range(40)), max_tokens=8)
    plans: list[StepPlan] = []
    rows: list[list[str]] = []

    def note(event: str, computes: str) -> None:
        cursors = (request.num_tokens, request.num_computed, request.num_planned, request.num_expected)
        rows.append([event, computes, *map(str, cursors)])

    for step in range(4):
        while core.can_plan():
            plan = planned(core)
            [start], [count] = unpack_int32(plan.start_positions), unpack_int32(plan.num_new_tokens)
            note(f"plan {plan.step}", f"[{start}, {start + count})" + " and samples" * plan.samples[0])
            plans.append(plan)
        answer(core, plans[step], request, 7)
        note(f"result {step}", "")
    documented = table_after(
        (DOCS / "scheduling.md").read_text(encoding="utf-8"),
        "| event | computes | known tokens | num_computed | num_planned | num_expected |",
    )
    assert documented == rows


def test_the_example_of_speculation_is_what_the_core_does() -> None:
    core = new_core(page_size=4, plans_ahead=1, speculation=SpeculationLimits(3, 2, 8))
    request = submit(core, 1, [1, 2, 3, 4, 5, 6, 7, 8, 1, 2], max_tokens=20)
    rows: list[list[str]] = []

    def note(event: str) -> None:
        cursors = (request.num_tokens, request.num_computed, request.num_planned, len(request.pages))
        rows.append([event, *map(str, cursors)])

    answer(core, planned(core), request, 3)
    note("11 tokens are known, three ids are proposed")
    plan = planned(core)
    assert (unpack_int32(plan.start_positions), unpack_int32(plan.proposal_ids)) == ([10], [4, 5, 6])
    note("plan: tokens [10, 14), the last three proposed")
    answer(core, plan, request, 4, 5, 9)
    note("result: three ids, so two proposals stand")
    assert (unpack_int32(planned(core).start_positions), request.num_planned) == ([13], 14)
    note("plan: token 13; it overwrites the KV of the third proposal")
    documented = table_after(
        (DOCS / "scheduling.md").read_text(encoding="utf-8"),
        "| event (page size 4, nothing in flight) | known tokens | num_computed | num_planned | pages |",
    )
    assert documented == rows


def tree_text(nodes: list[Node], parent: Node | None = None) -> str:
    """`0* (1 2 | 3)`: pages of a node, a star if it is locked, its children in parentheses."""
    own = sorted((node for node in nodes if _parent(node) is parent), key=lambda node: node.pages)
    texts = []
    for node in own:
        children = tree_text(nodes, node)
        pages = " ".join(map(str, node.pages)) + "*" * bool(node.num_locks)
        texts.append(f"{pages} ({children})" if children else pages)
    return (" | " if parent else ", ").join(texts)


def _parent(node: Node) -> Node | None:
    """None for a node right below a root, which holds no page."""
    return node.parent if node.parent is not None and node.parent.parent is not None else None


def test_the_example_of_the_kv_cache_is_what_the_ledger_does() -> None:
    core = new_core(page_size=4, plans_ahead=0)
    rows: list[list[str]] = []

    def note(request: Request) -> None:
        free = sorted(core.ledger.pool.free_pages())
        texts = [
            " ".join(map(str, request.pages)),
            tree_text(list(core.ledger.cache.nodes())),
            " ".join(map(str, free)),
        ]
        if not rows or texts != rows[-1]:
            rows.append(texts)

    prompts = [list(range(1, 11)), [*range(1, 7), *range(50, 54)], list(range(200, 216))]
    for number, (prompt, max_tokens) in enumerate(zip(prompts, (3, 3, 4), strict=True)):
        request = submit(core, number, prompt, max_tokens)
        while request.is_alive:
            plan = planned(core)
            note(request)
            answer(core, plan, request, 101 + number)
            core.check_invariants()
            note(request)
    documented = table_after(
        (DOCS / "kv-cache.md").read_text(encoding="utf-8"), "| after | request's pages | tree | free |"
    )
    assert [row[1:] for row in documented] == rows
