"""gpu_worker: from the grammar of a request to a matcher that its row can use, beside the work loop.

    loop:    submit ──▶ queue      answers ◀── loop is woken
    thread:             └─▶ the child vouches ─▶ build the matcher here ─▶ keep it ─┘

One thread asks the child (see `grammar_process`), and builds only what the child has built before within its limits.
Kept are the matchers of the grammars used last, as templates that rows copy, and what became of every grammar lately: a
bad one that is sent again costs nothing.

It owns the templates and the child. It must never make the loop wait for a compilation.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue

from llguidance import LLMatcher, LLTokenizer

from services.gpu_worker.grammar_process import ChildSpec, GrammarChildError, GrammarProcess
from services.gpu_worker.grammar_text import STEP_LIMITS, library_grammar
from services.gpu_worker.grammar_vocabulary import library_tokenizer
from services.model_files.source import open_model
from services.model_files.vocabulary import load_vocabulary
from services.runtime.histogram import Histogram
from services.wire.request_params import Grammar
from services.wire.steps import CompileGrammar, GrammarCompiled

COMPILE_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_MAX_TEMPLATES = 256
_MAX_TEMPLATE_CHARS = 4 * 2**20  # of their grammars together; a matcher takes about a hundred times its grammar
_MAX_VERDICTS = 4096

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class CompilerCounters:
    """What happened so far; these only grow."""

    num_compiled: int = 0
    num_refused: int = 0
    num_cached: int = 0


class GrammarCompiler:
    """Compiles grammars, one after the other. Nothing is loaded or started before the first."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._process = GrammarProcess(spec)
        self._queue: SimpleQueue[CompileGrammar | None] = SimpleQueue()
        self._answers: deque[GrammarCompiled] = deque()
        self._lock = threading.Lock()  # of the two tables
        self._templates: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._verdicts: OrderedDict[Grammar, str] = OrderedDict()
        self._thread: threading.Thread | None = None
        self._tokenizer: LLTokenizer | None = None
        self.counters = CompilerCounters()
        self.on_answer: Callable[[], None] = lambda: None
        """Called from the thread when there is an answer to take."""
        self.compile_seconds = Histogram(COMPILE_BOUNDS_S)
        """Times of compilations, in the child and here."""

    @property
    def num_children_killed(self) -> int:
        """Children that overran."""
        return self._process.num_killed

    @property
    def num_templates(self) -> int:
        """Compiled grammars that are kept."""
        return len(self._templates)

    def submit(self, request: CompileGrammar) -> None:
        """Takes a request; its answer comes at once when it is known, else later."""
        problem = self._known_problem(request.grammar)
        if problem is not None:
            self.counters.num_cached += 1
            self._answers.append(GrammarCompiled(request.request_id, request.attempt, problem))
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="grammar-compiler", daemon=True)
            self._thread.start()
        self._queue.put(request)

    def take_answers(self) -> list[GrammarCompiled]:
        """The answers that have come since the last call."""
        answers = []
        while self._answers:
            answers.append(self._answers.popleft())
        return answers

    def matcher(self, grammar: Grammar) -> LLMatcher | None:
        """A matcher for a row, at its beginning; None when this process has not compiled the grammar.

        A grammar that was pushed out since is built again, here: the child has found that it takes little.
        """
        with self._lock:
            template = self._templates.get(grammar)
            if template is not None:
                self._templates.move_to_end(grammar)
                return template.deep_copy()
            if self._verdicts.get(grammar) != "":
                return None
        template = self._build(grammar)
        self._keep(grammar, template)
        return template.deep_copy()

    def forget_matcher(self, grammar: Grammar) -> None:
        """Drops what is kept of a grammar: the next row gets a matcher that is built anew."""
        with self._lock:
            self._templates.pop(grammar, None)

    def close(self) -> None:
        """Ends the thread, as soon as it is done with what it does, and the child."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(self._spec.timeout_s)
        self._process.close()

    # ------------------------------------------------------------ the thread

    def _run(self) -> None:
        while (request := self._queue.get()) is not None:
            problem = self._known_problem(request.grammar)  # a sibling may have asked meanwhile
            if problem is None:
                problem = self._compile(request)
            else:
                self.counters.num_cached += 1
            self._answers.append(GrammarCompiled(request.request_id, request.attempt, problem))
            self.on_answer()

    def _compile(self, request: CompileGrammar) -> str:
        try:
            started_s = time.monotonic()
            problem = self._process.problem_of(request)
            if not problem:
                self._keep(request.grammar, self._build(request.grammar))
            self.compile_seconds.observe(time.monotonic() - started_s)
        except GrammarChildError as error:
            logger.error("%s", error)
            return "grammars cannot be compiled at present"
        except Exception:
            logger.exception("a grammar that its child has compiled cannot be built")
            return "it cannot be compiled"
        self.counters.num_refused += bool(problem)
        self.counters.num_compiled += not problem
        with self._lock:
            self._verdicts[request.grammar] = problem
            if len(self._verdicts) > _MAX_VERDICTS:
                self._verdicts.popitem(last=False)
        return problem

    def _known_problem(self, grammar: Grammar) -> str | None:
        with self._lock:
            return self._verdicts.get(grammar)

    def _build(self, grammar: Grammar) -> LLMatcher:
        if self._tokenizer is None:
            self._tokenizer = library_tokenizer(load_vocabulary(open_model(self._spec.model)), self._spec.width)
        matcher = LLMatcher(self._tokenizer, library_grammar(grammar), log_level=0, limits=STEP_LIMITS)
        if matcher.is_error():
            raise RuntimeError(matcher.get_error()[:200])
        return matcher

    def _keep(self, grammar: Grammar, template: LLMatcher) -> None:
        with self._lock:
            self._templates[grammar] = template
            num_chars = sum(len(kept.text) for kept in self._templates)
            while len(self._templates) > _MAX_TEMPLATES or (
                num_chars > _MAX_TEMPLATE_CHARS and len(self._templates) > 1
            ):
                dropped, _ = self._templates.popitem(last=False)
                num_chars -= len(dropped.text)
