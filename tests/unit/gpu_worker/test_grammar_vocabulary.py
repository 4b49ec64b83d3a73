"""The vocabulary as the grammar library sees it: what may be sampled, and how forced text becomes ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer

from services.gpu_worker.grammar_vocabulary import ForcedText, library_tokenizer
from services.model_files.source import open_model
from services.model_files.tokenizer import load_tokenizer
from services.model_files.vocabulary import Vocabulary, load_vocabulary
from tests.unit.gpu_worker.grammar_models import EMPTY, END, OTHER_END, SPECIAL, byte_vocabulary, vocabulary

WIDTH = 300  # of the logits: more than there are entries


def allowed(tokenizer: LLTokenizer, regex: str, before: bytes = b"") -> set[int]:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_regex(regex), log_level=0)
    assert matcher.consume_tokens(list(before))
    mask = matcher.compute_bitmask()
    return {index for index in range(8 * len(mask)) if mask[index >> 3] >> (index & 7) & 1}


def test_ends_only_where_the_grammar_accepts_and_other_special_ids_never() -> None:
    tokenizer = library_tokenizer(byte_vocabulary([b"aa", b"<|tool|>x"]), WIDTH)
    everything = allowed(tokenizer, "(?s:.)*")
    assert {END, OTHER_END, 260, 261} < everything
    assert not everything & {SPECIAL, EMPTY, *range(262, WIDTH + 32)}
    assert allowed(tokenizer, "ab?") == {ord("a")}
    assert allowed(tokenizer, "ab?", b"a") == {ord("b"), END, OTHER_END}
    assert allowed(tokenizer, "ab?", b"ab") == {END, OTHER_END}


def test_of_ids_with_the_same_bytes_all_are_allowed() -> None:
    tokens = [b"a", b"b", b"a", b"</s>"]
    tokenizer = library_tokenizer(vocabulary(tokens, [3], [3]), len(tokens))
    assert allowed(tokenizer, "[ac]*") == {0, 2, 3}


def test_a_vocabulary_wider_than_the_logits_gives_no_id_beyond_them() -> None:
    tokenizer = library_tokenizer(byte_vocabulary([b"aa", b"aaa"]), 261)
    assert tokenizer.vocab_size == 261
    assert 260 in allowed(tokenizer, "a*")


@pytest.fixture(scope="module")
def real(smollm2_path: Path) -> Vocabulary:
    return load_vocabulary(open_model(smollm2_path))


def test_forced_text_is_written_as_the_model_would(real: Vocabulary, smollm2_path: Path) -> None:
    """The keys of schemas, the text of a document, CJK and emoji: what the model's own tokenizer makes of them."""
    forced = ForcedText(real, real.num_entries)
    tokenizer = load_tokenizer(open_model(smollm2_path)).tokenizer
    document = (Path(__file__).parents[3] / "docs" / "architecture.md").read_text(encoding="utf-8")
    schema = (
        '{"invoiceNumber":"2024-01-02T03:04:05Z","line_items":[{"unitPrice":12.5,"日本語":"😀 emoji"}],"isPaid":true}'
    )
    texts = [schema, *document.splitlines()]
    same = sum(forced(text) == tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
    assert same / len(texts) > 0.98
    assert forced(schema) == tokenizer.encode(schema, add_special_tokens=False).ids


def test_forced_text_is_never_another_text(real: Vocabulary) -> None:
    forced = ForcedText(real, real.num_entries)
    known = {real.token_bytes(token_id) for token_id in range(real.num_entries)}
    missing = {byte for value in range(256) if (byte := bytes([value])) not in known}

    @given(st.text(max_size=200))
    def holds(text: str) -> None:
        token_ids, data = forced(text), text.encode()
        written = b"".join(map(real.token_bytes, token_ids))
        assert data.startswith(written)
        assert written == data or data[len(written) : len(written) + 1] in missing
        assert not real.special_token_ids.intersection(token_ids)

    holds()


def test_characters_come_first_in_a_vocabulary_that_is_no_byte_level_one() -> None:
    tokens = [bytes([byte]) for byte in range(256)] + ["é".encode(), "日".encode(), " 日".encode(), b"</s>"]
    forced = ForcedText(vocabulary(tokens, [259], [259]), len(tokens))
    assert forced("é日x") == [256, 257, ord("x")]
    assert forced(" 日本") == [258, *"本".encode()]


def test_long_text_takes_time_in_proportion(real: Vocabulary) -> None:
    forced = ForcedText(real, real.num_entries)
    assert len(forced("lorem ipsum " * 20_000)) > 40_000
    assert len(forced("x" * 16_000)) > 1000
