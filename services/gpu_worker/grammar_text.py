"""gpu_worker's grammar child: a `Grammar` of the wire to what the grammar library reads, and what it may cost.

Pure. The library enforces every keyword that it takes; what it does not know it refuses.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

from services.gpu_worker.grammar_ebnf import lark_of_ebnf
from services.wire.request_params import Grammar, GrammarKind

MAX_FORCED = 128
"""Most ids that a row jumps at once; the rest follows with the next one."""

STEP_LIMITS = LLParserLimits(
    max_lexer_states=50_000,  # a state takes 1 to 2 kB, and all rows of a grammar share them
    step_lexer_fuel=200_000,  # about 15 ms of a mask
    step_max_items=50_000,  # about 3 ms of a mask
    verbose_errors=False,
)
"""What one grammar may cost while rows use it; beyond it the row fails alone."""


def library_grammar(grammar: Grammar) -> str:
    """The grammar as the library reads it.

    Raises:
        ValueError: it cannot be written so; says why.
    """
    if grammar.kind is GrammarKind.JSON_SCHEMA:
        return LLMatcher.grammar_from_json_schema(grammar.text)
    if grammar.kind is GrammarKind.REGEX:
        return LLMatcher.grammar_from_regex(grammar.text)
    if grammar.kind is GrammarKind.EBNF:
        return LLMatcher.grammar_from_lark(lark_of_ebnf(grammar.text))
    return LLMatcher.grammar_from_lark(grammar.text)
