"""Requests whose grammar must be compiled: they wait for the worker's word, and are admitted or refused by it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.scheduler import answers
from services.scheduler.compilations import Compilations
from services.scheduler.request import Request, RequestState
from services.wire.answers import DecodeOpen
from services.wire.columns import pack_int32
from services.wire.finish import Finish
from services.wire.requests import Abort, Admitted, Refused, Resend
from services.wire.steps import CompileGrammar, GrammarCompiled, StepPlan
from tests.unit.scheduler.core_driver import Driver, new_limits
from tests.unit.scheduler.fake_worker import new_submit
from tests.unit.scheduler.scheduler_group import Peer, Pipeline, id_of, run_all, running_pipeline

PROMPT = list(range(1, 12))


def test_a_request_is_planned_only_when_its_grammar_is_compiled() -> None:
    driver = Driver(new_limits(64, 4))
    answer = driver.submit(new_submit(1, PROMPT, 5, grammar="a+"))
    assert answer.request.state is RequestState.COMPILING
    assert (driver.core.num_waiting, len(driver.core.queues.compiling)) == (1, 1)
    assert not driver.plan()
    (ask,) = driver.core.grammar_asks()
    assert (ask.request_id, ask.attempt, ask.grammar.text) == (id_of(1), 0, "a+")
    assert driver.core.grammar_asks() == []
    assert driver.core.grammar_compiled(GrammarCompiled(id_of(1), 0)) == [answer.request]
    assert driver.core.grammar_compiled(GrammarCompiled(id_of(1), 0)) == []
    driver.run()
    driver.check_answer(answer)


def test_others_go_on_while_a_grammar_is_compiled_and_their_queue_is_counted_together() -> None:
    driver = Driver(new_limits(64, 4, max_rows=1, max_waiting=0))
    waiting = driver.submit(new_submit(1, PROMPT, 5, grammar="a+"))
    with pytest.raises(Exception, match="queue is full"):
        driver.submit(new_submit(2, PROMPT, 5))
    driver.core.end(waiting.request, Finish.ABORTED)
    waiting.finish = Finish.ABORTED
    other = driver.submit(new_submit(3, PROMPT, 5))
    driver.run()
    driver.check_answer(other)


def test_siblings_share_one_compilation_and_then_the_prompt() -> None:
    driver = Driver(new_limits(400, 4))
    prompt = list(range(30))
    siblings = [
        driver.submit(new_submit(1 + choice, prompt, 6, group_id=1, choice=choice, grammar="a+")) for choice in range(3)
    ]
    stranger = driver.submit(new_submit(9, PROMPT, 6, grammar="b+"))
    asks = driver.core.grammar_asks()
    assert [(ask.request_id, ask.grammar.text) for ask in asks] == [(id_of(1), "a+"), (id_of(9), "b+")]
    driver.core.grammar_compiled(GrammarCompiled(id_of(1), 0))
    driver.core.check_invariants()
    states = [answer.request.state for answer in (*siblings, stranger)]
    assert states == [RequestState.WAITING, RequestState.HELD, RequestState.HELD, RequestState.COMPILING]
    driver.core.grammar_compiled(GrammarCompiled(id_of(9), 0))
    driver.run()
    assert [answer.request.cached_tokens for answer in siblings] == [0, 28, 28]
    for answer in (*siblings, stranger):
        driver.check_answer(answer)


def test_when_the_one_in_whose_name_was_asked_goes_the_answer_is_still_for_the_others() -> None:
    driver = Driver(new_limits(64, 4))
    first, second = (driver.submit(new_submit(number, PROMPT, 5, grammar="a+")) for number in (1, 2))
    driver.core.grammar_asks()
    driver.abort(first)
    assert driver.core.grammar_compiled(GrammarCompiled(id_of(1), 0)) == [second.request]
    driver.run()
    driver.check_answer(second)


def test_a_late_answer_that_nobody_waits_for_changes_nothing() -> None:
    driver = Driver(new_limits(64, 4))
    driver.abort(driver.submit(new_submit(1, PROMPT, 5, grammar="a+")))
    assert driver.core.grammar_compiled(GrammarCompiled(id_of(1), 0, "bad")) == []
    assert driver.core.is_idle
    again = driver.submit(new_submit(2, PROMPT, 5, grammar="a+"))
    assert [ask.request_id for ask in driver.core.grammar_asks()] == [id_of(1), id_of(2)]
    driver.core.grammar_compiled(GrammarCompiled(id_of(2), 0))
    driver.run()
    driver.check_answer(again)


def test_a_request_without_a_grammar_has_nothing_to_wait_for() -> None:
    with pytest.raises(ValueError, match="nothing to wait for"):
        Compilations().add(Request(new_submit(1, PROMPT, 5), 20, 0))


# ---------------------------------------------------------------- over the wire


def asked(pipeline: Pipeline) -> list[CompileGrammar]:
    pipeline.group.pump(lambda: bool(pipeline.gpu_worker.of(CompileGrammar)))
    return pipeline.gpu_worker.of(CompileGrammar)


def refusal_of(pipeline: Pipeline) -> Refused:
    pipeline.group.pump(lambda: bool(pipeline.tokenizer.of(Refused)))
    (refused,) = pipeline.tokenizer.of(Refused)
    return refused


def test_admitted_comes_after_the_workers_word() -> None:
    with running_pipeline() as pipeline:
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5, grammar="a+"))
        (ask,) = asked(pipeline)
        run_all(pipeline, [new_submit(2, PROMPT, 5)])
        admitted = [message.request_id for message in pipeline.tokenizer.of(Admitted)]
        assert admitted == [id_of(2)]
        assert [message.request_id for message in pipeline.detokenizer.of(DecodeOpen)] == [id_of(2)]
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5, grammar="a+"))  # asked again meanwhile: no answer yet
        pipeline.tokenizer.send(Resend(id_of(1), pack_int32([0]), pack_int32([0])))
        run_all(pipeline, [new_submit(3, PROMPT, 5)])
        assert len(pipeline.tokenizer.of(Admitted)) == 2
        pipeline.gpu_worker.send(GrammarCompiled(ask.request_id, ask.attempt))
        pipeline.group.pump(lambda: bool(pipeline.finish_of(1)))
        assert pipeline.tokenizer.of(Admitted)[-1].request_id == id_of(1)
        plans = pipeline.gpu_worker.of(StepPlan)
        grammars = [row.sampling.grammar for plan in plans for row in plan.new_rows if row.request_id == id_of(1)]
        assert grammars == [ask.grammar]


def test_a_grammar_that_cannot_be_used_is_a_400_for_all_who_wait_for_it() -> None:
    with running_pipeline() as pipeline:
        for number in (1, 2):
            pipeline.tokenizer.send(new_submit(number, PROMPT, 5, group_id=1, choice=number - 1, grammar="("))
        run_all(pipeline, [new_submit(3, PROMPT, 5)])
        (ask,) = asked(pipeline)
        pipeline.gpu_worker.send(GrammarCompiled(ask.request_id, ask.attempt, "a bracket is not closed"))
        pipeline.group.pump(lambda: len(pipeline.tokenizer.of(Refused)) == 2)
        for number, refused in enumerate(pipeline.tokenizer.of(Refused), 1):
            assert refused == Refused(id_of(number), 0, 400, "invalid_grammar", "a bracket is not closed", "grammar", 0)
        again = new_submit(1, PROMPT, 5, attempt=1)
        run_all(pipeline, [again])


def test_a_worker_that_says_nothing_is_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "GRAMMAR_LIMIT_S", 0.05)
    with running_pipeline() as pipeline:
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5, grammar="a+"))
        refused = refusal_of(pipeline)
        assert (refused.status, refused.code, refused.retry_after_s > 0) == (503, "grammar_timeout", True)
        (ask,) = asked(pipeline)
        pipeline.gpu_worker.send(GrammarCompiled(ask.request_id, ask.attempt))
        run_all(pipeline, [new_submit(2, PROMPT, 5)])
        assert [message.request_id for message in pipeline.tokenizer.of(Admitted)] == [id_of(2)]


def test_a_deadline_that_passes_meanwhile_is_a_504() -> None:
    with running_pipeline() as pipeline:
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5, grammar="a+", deadline_ms=30))
        refused = refusal_of(pipeline)
        assert (refused.status, refused.code) == (504, "timeout")


def test_who_goes_away_meanwhile_is_forgotten() -> None:
    with running_pipeline() as pipeline:
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5, grammar="a+"))
        asked(pipeline)
        pipeline.tokenizer.send(Abort(id_of(1), pack_int32([0])))
        run_all(pipeline, [new_submit(2, PROMPT, 5)])
        assert not [message for message in pipeline.detokenizer.of(DecodeOpen) if message.request_id == id_of(1)]
        pipeline.gpu_worker.send(GrammarCompiled(id_of(1), 0))
        run_all(pipeline, [replace(new_submit(1, PROMPT, 5), attempt=1)])
        assert not pipeline.tokenizer.of(Refused)


def test_a_request_that_is_submitted_again_meanwhile_waits_under_its_new_attempt_alone() -> None:
    with running_pipeline() as pipeline:
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5, grammar="a+"))
        asked(pipeline)
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5, grammar="a+", attempt=1))
        pipeline.group.pump(lambda: len(asked(pipeline)) == 2)
        pipeline.gpu_worker.send(GrammarCompiled(id_of(1), 0))
        pipeline.gpu_worker.send(GrammarCompiled(id_of(1), 1))
        pipeline.group.pump(lambda: bool(pipeline.finish_of(1)))
        assert [message.attempt for message in pipeline.tokenizer.of(Admitted)] == [1]
        assert not pipeline.tokenizer.of(Refused)


@pytest.mark.parametrize("role", ["detokenizer", "gpu_worker"])
def test_a_lost_peer_refuses_who_was_not_admitted(role: str) -> None:
    with running_pipeline() as pipeline:
        pipeline.tokenizer.send(new_submit(1, PROMPT, 5, grammar="a+"))
        asked(pipeline)
        peer: Peer = getattr(pipeline, role)
        peer.send(peer.session.goodbye())
        refused = refusal_of(pipeline)
        assert (refused.status, refused.code) == (503, "backend_lost")
