"""Grammars are compiled in a child that can be killed, beside the loop; the worker keeps what is good."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from services.gpu_worker import grammar_compiler
from services.gpu_worker.grammar_compiler import GrammarCompiler
from services.gpu_worker.grammar_process import ChildSpec, GrammarChildError, GrammarProcess
from services.wire.request_params import Grammar, GrammarKind
from services.wire.steps import CompileGrammar, GrammarCompiled

WIDTH = 49152
GOOD = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"x-guidance":{"whitespace_flexible":false},"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}',
)
LONG_LIST = Grammar(
    GrammarKind.JSON_SCHEMA,
    '{"x-guidance":{"whitespace_flexible":false},"type":"array","minItems":60000,"items":{"const":1}}',
)
SLOW = Grammar(GrammarKind.JSON_SCHEMA, '{"type":"object","properties":{%s}}' % ",".join(  # noqa: UP031
    f'"property_{index}":{{"type":"string","maxLength":{index + 1}}}' for index in range(9000)
))  # fmt: skip


def request(grammar: Grammar, number: int = 0) -> CompileGrammar:
    return CompileGrammar(number.to_bytes(16, "big"), number, grammar)


class Asked:
    """A compiler and the answers that woke its owner."""

    def __init__(self, spec: ChildSpec) -> None:
        self.compiler = GrammarCompiler(spec)
        self._woken = threading.Semaphore(0)
        self.compiler.on_answer = self._woken.release
        self._came: list[GrammarCompiled] = []

    def ask(self, *grammars: Grammar) -> list[str]:
        """The problems of several grammars, asked for at once."""
        for number, grammar in enumerate(grammars):
            self.compiler.submit(request(grammar, number))
        self._came += self.compiler.take_answers()
        while len(self._came) < len(grammars):
            assert self._woken.acquire(timeout=60)
            self._came += self.compiler.take_answers()
        answers, self._came = sorted(self._came, key=lambda answer: answer.attempt), []
        assert [answer.request_id for answer in answers] == [request(GOOD, n).request_id for n in range(len(grammars))]
        return [answer.problem for answer in answers]


@pytest.fixture(scope="module")
def spec(smollm2_path: Path) -> ChildSpec:
    return ChildSpec(str(smollm2_path), WIDTH, timeout_s=30.0, memory_mib=512)


@pytest.fixture(scope="module")
def asked(spec: ChildSpec) -> Iterator[Asked]:
    asked = Asked(spec)
    yield asked
    asked.compiler.close()


@pytest.fixture
def process(spec: ChildSpec) -> Iterator[Callable[..., GrammarProcess]]:
    started: list[GrammarProcess] = []

    def start(**limits: object) -> GrammarProcess:
        started.append(GrammarProcess(replace(spec, **limits)))  # type: ignore[arg-type]
        return started[-1]

    yield start
    for each in started:
        each.close()


def test_nothing_is_loaded_or_started_before_the_first_grammar(spec: ChildSpec) -> None:
    compiler = GrammarCompiler(spec)
    assert compiler.take_answers() == []
    assert compiler.matcher(GOOD) is None
    assert compiler._thread is None
    assert compiler._process.pid is None
    compiler.close()


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (GOOD, ""),
        (Grammar(GrammarKind.REGEX, "(日本|😀)+"), ""),
        (Grammar(GrammarKind.EBNF, 'root ::= "a" root | "b"'), ""),
        (Grammar(GrammarKind.LARK, 'start: CHOICE\nCHOICE: "a" | "日本"'), ""),
        (Grammar(GrammarKind.REGEX, "("), "unclosed group"),
        (Grammar(GrammarKind.REGEX, "(?=a)b"), "look-around"),
        (Grammar(GrammarKind.EBNF, "root ::= x"), "needs x, which is not there"),
        (Grammar(GrammarKind.LARK, "start: nothing"), "nothing"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":"notatype"}'), "notatype"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":"array","uniqueItems":true}'), "uniqueItems"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"allOf":[{"type":"string"},{"type":"null"}]}'), "Unsatisfiable"),
        (Grammar(GrammarKind.JSON_SCHEMA, "no json"), "expected"),
        (Grammar(GrammarKind.REGEX, "(a{1000}){1000}"), "it takes too much to follow"),
        (Grammar(GrammarKind.REGEX, "a{1000000}"), "it takes too much to follow"),
        (LONG_LIST, "it takes too much to follow"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"$ref":"#/$defs/0","$defs":{"0":{"$ref":"#/$defs/0"}}}'), "no text is"),
    ],
)  # fmt: skip
def test_str_01_a_grammar_is_compiled_or_refused_with_the_reason(asked: Asked, grammar: Grammar, problem: str) -> None:
    [found] = asked.ask(grammar)
    assert problem in found
    assert bool(problem) == bool(found)
    assert (asked.compiler.matcher(grammar) is None) == bool(problem)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        (Grammar(GrammarKind.REGEX, "("), "a regular expression cannot be read: unclosed group, at character 1"),
        (
            Grammar(GrammarKind.REGEX, "a/b\n\\/日("),
            "a regular expression cannot be read: unclosed group, at character 8",
        ),
        (Grammar(GrammarKind.REGEX, "ab[z-a]{2}"), "the start must be <= the end, at character 4"),
        (
            Grammar(GrammarKind.JSON_SCHEMA, '{"type":"string","pattern":"a("}'),
            'unclosed group, at character 2 of "a("',
        ),
        (Grammar(GrammarKind.REGEX, r"a\b"), "lookarounds not supported yet"),
        (
            Grammar(GrammarKind.LARK, 'start: %json {"type":"string","pattern":"("}'),
            'unclosed group, at character 1 of "("',
        ),
        (Grammar(GrammarKind.EBNF, 'root ::= ("a" root){5,2}'), "range end must be >= start, got (5, 2)"),
        (Grammar(GrammarKind.JSON_SCHEMA, '{"type":"string","minLength":5,"pattern":"^a$"}'), "Regex is empty"),
    ],
)
def test_what_the_library_says_comes_as_one_sentence_without_its_own_text(
    asked: Asked, grammar: Grammar, problem: str
) -> None:
    [found] = asked.ask(grammar)
    assert found.endswith(problem)
    assert "\n" not in found
    assert "R0" not in found
    assert not found.startswith("at ")


def test_a_grammar_asked_for_again_costs_nothing(asked: Asked) -> None:
    bad = Grammar(GrammarKind.REGEX, "[")
    first = asked.ask(GOOD, bad, GOOD)
    num_compiled = asked.compiler.counters.num_compiled
    asked.compiler.submit(request(bad))
    asked.compiler.submit(request(GOOD, 1))
    assert [answer.problem for answer in asked.compiler.take_answers()] == [first[1], ""]
    assert asked.compiler.counters.num_compiled == num_compiled


def test_matchers_of_one_grammar_do_not_know_each_other(asked: Asked) -> None:
    assert asked.ask(GOOD) == [""]
    left, right = asked.compiler.matcher(GOOD), asked.compiler.matcher(GOOD)
    assert left is not None
    assert right is not None
    forced = left.compute_ff_tokens()
    assert forced
    assert left.consume_tokens(forced)
    assert right.compute_ff_tokens() == forced


def test_what_is_kept_is_bounded_and_built_again_when_needed(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_compiler, "_MAX_TEMPLATES", 2)
    grammars = [Grammar(GrammarKind.REGEX, f"x{number}") for number in range(4)]
    assert asked.ask(*grammars) == [""] * 4
    assert asked.compiler.num_templates == 2
    assert asked.compiler.matcher(grammars[0]) is not None
    assert asked.compiler.num_templates == 2
    monkeypatch.setattr(grammar_compiler, "_MAX_TEMPLATES", 100)
    monkeypatch.setattr(grammar_compiler, "_MAX_TEMPLATE_CHARS", 5)
    assert asked.ask(Grammar(GrammarKind.REGEX, "x" * 4), Grammar(GrammarKind.REGEX, "y" * 4)) == ["", ""]
    assert asked.compiler.num_templates == 1


def test_str_01_a_grammar_that_takes_too_long_ends_its_child_and_nothing_else(
    process: Callable[..., GrammarProcess],
) -> None:
    process_ = process(timeout_s=0.2)
    assert "more than 0.2 s" in process_.problem_of(request(SLOW))
    assert process_.pid is None
    assert process_.num_killed == 1
    assert process_.problem_of(request(GOOD)) == ""


def test_str_01_a_grammar_that_takes_too_much_memory_ends_its_child_and_nothing_else(
    process: Callable[..., GrammarProcess],
) -> None:
    process_ = process(memory_mib=8)
    assert "more than 8 MiB" in process_.problem_of(request(SLOW))
    assert process_.num_killed == 1
    assert process_.problem_of(request(GOOD)) == ""


def test_a_child_that_died_is_started_again(process: Callable[..., GrammarProcess]) -> None:
    process_ = process()
    assert process_.problem_of(request(GOOD)) == ""
    first = process_.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
    assert process_.problem_of(request(GOOD)) == ""
    assert process_.pid != first


def test_a_child_that_does_not_start_is_no_fault_of_the_grammar(spec: ChildSpec) -> None:
    broken = GrammarProcess(replace(spec, model="/nowhere"))
    with pytest.raises(GrammarChildError):
        broken.problem_of(request(GOOD))
    assert Asked(replace(spec, model="/nowhere")).ask(GOOD) == ["grammars cannot be compiled at present"]


def test_the_child_ends_with_its_worker(spec: ChildSpec) -> None:
    child = subprocess.Popen(spec.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    child.stdin.close()
    assert child.wait(timeout=20) == 0
    child.stdout.close()


def test_a_child_whose_worker_is_gone_does_not_go_on_with_a_slow_grammar(spec: ChildSpec) -> None:
    from services.wire.codec import encode

    child = subprocess.Popen(replace(spec, timeout_s=0.2).command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline() == b"ready\n"
    frame = encode(request(SLOW))
    child.stdin.write(len(frame).to_bytes(4, "big") + frame)
    child.stdin.close()
    started_s = time.monotonic()
    assert child.wait(timeout=20) == -signal.SIGALRM
    assert time.monotonic() - started_s < 10
    child.stdout.close()
