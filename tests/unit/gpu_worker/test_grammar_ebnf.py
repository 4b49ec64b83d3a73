"""EBNF to the grammar library: exactly its sentences, whatever the library's lexer would rather do."""

from __future__ import annotations

import pytest
from llguidance import LLMatcher, LLTokenizer

from services.gpu_worker.grammar_ebnf import EbnfError, lark_of_ebnf
from services.gpu_worker.grammar_vocabulary import library_tokenizer
from tests.unit.gpu_worker.grammar_models import byte_vocabulary


@pytest.fixture(scope="module")
def tokenizer() -> LLTokenizer:
    return library_tokenizer(byte_vocabulary(), 260)


def accepts(tokenizer: LLTokenizer, source: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, lark_of_ebnf(source), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    data = list(text.encode())
    return matcher.try_consume_tokens(data) == len(data) and matcher.is_accepting()


SUM = """
# a sum
root ::= term (("+" | "-") term)*   # of terms
term ::= number
       | "(" root ")"
number ::= [0-9]+ ("." [0-9]{1,3})?
"""


@pytest.mark.parametrize(
    ("source", "sentences", "others"),
    [
        ('root ::= "a" | "b"', ["a", "b"], ["", "ab", "c"]),
        ('root ::= "a" |\n  "b"', ["a", "b"], []),
        ("root ::= 'a\"' [^\"\\n]", ['a"x', 'a"日'], ['a""', 'a"\n']),
        ('root ::= "" | "x"', ["", "x"], ["xx"]),
        ("root ::= [a-cx\\-] [\\]\\^]", ["a]", "-^", "x]"], ["d]", "a-"]),
        ("root ::= [-a] [^-a]", ["-b", "ab"], ["--", "aa"]),
        ('root ::= "\\x41\\u00e9\\U0001F600\\t\\\\"', ["Aé😀\t\\"], ["A"]),
        ("root ::= [\\u4e00-\\u9fff]+", ["日本"], ["x", ""]),
        ("root ::= .", ["a", "\n", "日"], ["", "ab"]),
        ('root ::= "a"* "b"+ "c"? "d"{2} "e"{1,} "f"{0,2}', ["bdde", "aabbcddeeff"], ["dde", "bde", "bddefff"]),
        ('root ::= ("a" | "b" ("c" | "d"))+', ["a", "bca", "bdbd"], ["b", ""]),
        ('start ::= "a"\nroot ::= start', ["a"], ["b"]),
        ('root ::= A-b.c\nA-b.c ::= "q"', ["q"], ["A"]),
        ('root ::= "<|im_end|>"', ["<|im_end|>"], []),
        (SUM, ["1", "1.5-(2+3)", "((7))"], ["", "1+", "(1", "1.2345"]),
    ],
)
def test_sentences_are_those_of_the_grammar(
    tokenizer: LLTokenizer, source: str, sentences: list[str], others: list[str]
) -> None:
    for text in sentences:
        assert accepts(tokenizer, source, text), text
    for text in others:
        assert not accepts(tokenizer, source, text), text


@pytest.mark.parametrize("extra", ["", ' | "(" root ")"'])
def test_no_terminal_eats_what_the_next_one_needs(tokenizer: LLTokenizer, extra: str) -> None:
    """The library's own terminals are greedy; with recursion and without, ours must not be."""
    assert accepts(tokenizer, f'root ::= [a-z]+ "s"{extra}', "cats")
    keyword = f'root ::= "if" name "?" | name "!"{extra}\nname ::= [a-z]+'
    assert accepts(tokenizer, keyword, "ifx?")
    assert accepts(tokenizer, keyword, "ifx!")
    assert not accepts(tokenizer, keyword, "xif?")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", "no rule named root"),
        ('other ::= "a"', "no rule named root"),
        ("root ::= x", "line 1, column 10: the rule root needs x, which is not there"),
        ('root ::= b\nb ::= "a"\n  x* x', "line 3, column 3: the rule b needs x, which is not there"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule root is there twice"),
        ('root ::= (\n"a"', "line 2, column 1: a group is not closed"),
        ('root ::= "a" )', "a rule begins with NAME ::="),
        ("root ::= *", "line 1, column 10: * has nothing before it"),
        ('root ::= "a', "line 1, column 10: cannot be read from '\"a' on"),
        ('root ::= "\\q"', "\\q is no known escape"),
        ('root ::= "\\ud800"', "\\ud800 is no character"),
        ("root ::= [z-a]", "the range 'z' to 'a' is empty"),
        ("root ::= []", "a class is empty"),
        ("root ::= " + "(" * 70 + '"a"' + ")" * 70, "more than 64 deep"),
        ('"a" ::= root', "a rule begins with NAME ::="),
    ],
)
def test_str_01_what_is_no_ebnf_is_named_with_its_place(source: str, problem: str) -> None:
    with pytest.raises(EbnfError) as caught:
        lark_of_ebnf(source)
    assert problem in str(caught.value)


def test_rules_that_the_root_does_not_need_may_be_anything() -> None:
    assert lark_of_ebnf('root ::= "a"\nunused ::= missing') == lark_of_ebnf('root ::= "a"')


def test_a_long_chain_of_rules_is_no_deep_recursion() -> None:
    chain = "\n".join(f"r{index} ::= r{index + 1}" for index in range(3000))
    assert lark_of_ebnf(f'root ::= r0\n{chain}\nr3000 ::= "a"').count("\n") > 3000
