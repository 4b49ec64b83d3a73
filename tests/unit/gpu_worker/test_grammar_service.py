"""The worker service with grammars, on real sockets and the demo model, under a scheduler that the test plays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from services.model_files.source import open_model
from services.model_files.tokenizer import LoadedTokenizer, load_tokenizer
from services.wire.finish import Finish
from services.wire.request_params import Grammar, GrammarKind, SamplingParams
from services.wire.steps import CompileGrammar, GrammarCompiled
from tests.sockets import sockets
from tests.unit.gpu_worker.plan_writer import PlanWriter, Request
from tests.unit.gpu_worker.worker_peer import TestScheduler, serving, worker_settings

pytestmark = pytest.mark.timeout(300)

END = 2
PERSON = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps(
        {
            "x-guidance": {"whitespace_flexible": False},
            "type": "object",
            "properties": {"firstName": {"type": "string", "maxLength": 12}, "日本": {"enum": ["はい", "いいえ"]}},
            "required": ["firstName", "日本"],
            "additionalProperties": False,
        }
    ),
)
CHOICE = Grammar(GrammarKind.REGEX, "(yes|no), (yes|no)")
TOO_HARD = Grammar(GrammarKind.REGEX, "(")


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> LoadedTokenizer:
    return load_tokenizer(open_model(smollm2_path))


def compiled(scheduler: TestScheduler, *grammars: Grammar) -> list[str]:
    before = len(scheduler.all_of(GrammarCompiled))
    for number, grammar in enumerate(grammars):
        scheduler.send(CompileGrammar(number.to_bytes(16, "big"), 3, grammar))
    answers = scheduler.wait_for(GrammarCompiled, before + len(grammars))[before:]
    assert {answer.attempt for answer in answers} == {3}
    by_id = {answer.request_id: answer.problem for answer in answers}
    return [by_id[number.to_bytes(16, "big")] for number in range(len(grammars))]


def people(tokenizer: LoadedTokenizer, count: int, grammar: Grammar = PERSON) -> list[Request]:
    prompt = tokenizer.tokenizer.encode("Who are you? Answer in JSON: ").ids
    params = SamplingParams(1.0, 1.0, 0, 0.0, 0, 0, grammar=grammar)
    return [Request(n, list(prompt), replace(params, temperature=float(n % 2), seed=n)) for n in range(count)]


def run_to_end(scheduler: TestScheduler, requests: list[Request], writer: PlanWriter | None = None) -> PlanWriter:
    """Runs all until each has ended or failed; what came behind an end does not count."""
    writer = writer or scheduler.new_writer()
    for _ in range(120):
        open_ones = [request for request in requests if not request.finish and END not in request.output]
        if not open_ones:
            break
        parts = [(r, (r.num_expected or len(r.token_ids)) - r.num_planned) for r in open_ones]
        writer.take(scheduler.run(writer.plan(*parts)))
    for request in requests:
        if END in request.output:
            del request.output[request.output.index(END) + 1 :]
    return writer


def text_of(tokenizer: LoadedTokenizer, request: Request) -> str:
    assert request.output[-1] == END, request.output
    return b"".join(map(tokenizer.vocabulary.token_bytes, request.output[:-1])).decode()


def test_answers_keep_to_their_grammars_and_jumping_changes_none(
    smollm2_path: Path, tokenizer: LoadedTokenizer
) -> None:
    """Greedy and drawn answers, several in one step."""
    texts: list[list[str]] = []
    for jumps in (True, False):
        with sockets() as net:
            settings = replace(worker_settings(smollm2_path, net.directory), jump_ahead=jumps, max_model_len=256)
            with serving(settings, net) as (scheduler, _):
                assert compiled(scheduler, PERSON, CHOICE, TOO_HARD)[:2] == ["", ""]
                requests = people(tokenizer, 4)
                requests[3].sampling = replace(requests[3].sampling, grammar=CHOICE)
                run_to_end(scheduler, requests)
                texts.append([text_of(tokenizer, request) for request in requests])
    assert texts[0] == texts[1]
    for text in texts[0][:3]:
        person = json.loads(text)
        assert list(person) == ["firstName", "日本"]
        assert len(person["firstName"]) <= 12
        assert person["日本"] in ("はい", "いいえ")
    assert texts[0][3] in ("yes, yes", "yes, no", "no, yes", "no, no")


def test_str_01_a_bad_grammar_is_answered_with_its_problem_and_the_worker_lives(
    smollm2_path: Path, tokenizer: LoadedTokenizer
) -> None:
    with sockets() as net, serving(worker_settings(smollm2_path, net.directory), net) as (scheduler, _):
        problems = compiled(scheduler, TOO_HARD, PERSON, TOO_HARD)
        assert "unclosed group" in problems[0]
        assert problems[1:] == ["", problems[0]]
        requests = people(tokenizer, 3)
        requests[1].sampling = replace(requests[1].sampling, grammar=Grammar(GrammarKind.REGEX, "never compiled"))
        writer = run_to_end(scheduler, requests)
        assert [request.finish for request in requests] == [Finish.NONE, Finish.INTERNAL_ERROR, Finish.NONE]
        assert json.loads(text_of(tokenizer, requests[0]))
        # One whose row was taken away comes back with what it had, and goes on where it was.
        back = replace(people(tokenizer, 1)[0], number=7, output=requests[0].output[:6])
        run_to_end(scheduler, [back], writer)
        assert back.output[:6] == requests[0].output[:6]
        assert json.loads(text_of(tokenizer, back))
