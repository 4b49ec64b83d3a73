"""A prompt cut at its tokens, whatever way the vocabulary spells them, and where it is rendered."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.launcher.cli import main
from services.launcher.render import coloured
from services.launcher.terminal import Terminal
from services.launcher.token_pieces import token_pieces
from services.model_files.source import open_model
from services.model_files.tokenizer import load_tokenizer
from tests.unit.launcher.openai_server import openai_server


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    return load_tokenizer(open_model(str(smollm2_path))).tokenizer


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_the_pieces_of_a_byte_level_vocabulary_are_the_text(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assume(tokenizer.decode(ids, skip_special_tokens=False) == text)  # it has no token for some bytes
    pieces = token_pieces(text, [tokenizer.id_to_token(token_id) or "" for token_id in ids])
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


def test_a_character_belongs_to_the_last_of_its_tokens() -> None:
    assert token_pieces("你 a", ["ä½", "ł", "Ġa"]) == ["", "你", " a"]


def test_other_spellings_are_read_too() -> None:
    assert token_pieces("Hi <s>there", ["Hi", "▁", "<s>", "there"]) == ["Hi", " ", "<s>", "there"]
    assert token_pieces("Hi you", ["▁Hi", "▁you"]) == ["Hi", " you"]
    assert token_pieces("é", ["<0xC3>", "<0xA9>"]) == ["", "é"]
    assert token_pieces("quite other", ["a", "▁b"]) == ["a", "▁b"]
    assert token_pieces("", []) == []


def test_neighbouring_tokens_have_different_backgrounds_and_line_ends_are_shown() -> None:
    shown = coloured(["a", "b\n\nc", "\x1b"], Terminal(io.StringIO(), has_color=True))
    first, second, third = "\033[48;5;24m", "\033[48;5;58m", "\033[48;5;90m"
    assert shown == f"{first}a\033[0m{second}b⏎\033[0m\n{second}⏎\033[0m\n{second}c\033[0m{third}\ufffd\033[0m"
    assert coloured(["a", "b\n"], Terminal(io.StringIO(), has_color=False)) == "ab⏎\n"


def test_messages_are_rendered_from_the_models_files_without_a_server(
    smollm2_path: Path, tmp_path: Path, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chat.json"
    path.write_text(json.dumps([{"role": "user", "content": "你好 <|im_end|>"}]), encoding="utf-8")
    assert main(["render", str(path), "--model", str(smollm2_path)]) == 0
    text, _, count, ids = capsys.readouterr().out.rsplit("\n", 4)[:4]
    assert text.endswith("<|im_start|>user\n你好 <|im_end|><|im_end|>\n<|im_start|>assistant\n")
    numbers = [int(word) for word in ids.split()]
    assert count == f"{len(numbers)} tokens of at most 8192"
    assert tokenizer.decode(numbers, skip_special_tokens=False) == text
    assert numbers.count(tokenizer.token_to_id("<|im_end|>") or 0) == 2  # not the one that the user wrote
    assert main(["render", str(path), "--model", str(smollm2_path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["text"], found["token_ids"], found["count"]) == (text, numbers, len(numbers))


def test_a_whole_request_is_rendered_and_a_bad_one_is_named(
    smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "whatever", "messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(body)))
    assert main(["render", "-", "--model", str(smollm2_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"].endswith("Hi<|im_end|>\n")
    monkeypatch.setattr(sys, "stdin", io.StringIO('[{"role": "clown", "content": "Hi"}]'))
    assert main(["render", "-", "--model", str(smollm2_path)]) == 2
    error = capsys.readouterr().err
    assert "clown" in error or "role" in error
    assert len(error.splitlines()) == 1


def test_a_server_renders_with_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "chat.json"
    path.write_text('{"messages": [{"role": "user", "content": "Hi"}], "tools": []}')
    rendered = {"text": "<s>Hi", "token_ids": [1, 9], "token_strs": ["<s>", "Hi"], "count": 2, "max_model_len": 64}
    with openai_server() as server:
        server.other["/v1/chat/completions/render"] = rendered
        assert main(["render", str(path), "--url", server.url]) == 0
        assert capsys.readouterr().out == "<s>Hi\n\n2 tokens of at most 64\n1 9\n"
        expected = {"model": "model-a", "messages": [{"role": "user", "content": "Hi"}], "tools": []}
        assert server.asked == [expected]
        server.refusal = (400, "messages[0].role: not known")
        assert main(["render", str(path), "--url", server.url]) == 2
        assert "status 400: messages[0].role: not known" in capsys.readouterr().err
        server.refusal, server.other["/v1/chat/completions/render"] = None, {"unexpected": 1}
        assert main(["render", str(path), "--url", server.url]) == 2
        assert "not a rendered prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "problem"),
    [("{", "is not JSON"), ("5", "holds neither"), ('{"messages": 5}', "holds neither"), (None, "No such file")],
)
def test_a_file_without_messages_is_named(
    text: str | None, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "chat.json"
    if text is not None:
        path.write_text(text)
    assert main(["render", str(path)]) == 2
    error = capsys.readouterr().err
    assert problem in error
    assert len(error.splitlines()) == 1


def test_a_model_that_was_not_fetched_is_not_fetched_for_this(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TOKENWAY_MODELS_DIR", str(tmp_path))
    (tmp_path / "chat.json").write_text("[]")
    assert main(["render", str(tmp_path / "chat.json"), "--model", "qwen3:8b"]) == 2
    assert "model qwen3:8b is not on this disk" in capsys.readouterr().err
