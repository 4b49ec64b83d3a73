"""Conversations become the prompts that transformers makes of them; awkward ones the right prompt or a clear error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from services.model_files.errors import ModelFileError
from services.model_files.source import open_model
from services.model_files.tokenizer import LoadedTokenizer, load_tokenizer
from services.tokenizer.chat_template import ChatTemplate, TemplateChoices
from services.tokenizer.control_tokens import ControlTokens
from services.tokenizer.conversation import Conversation
from services.tokenizer.prompt_errors import (
    ChatTemplateError,
    ConversationError,
    InvalidTextError,
    NoChatTemplateError,
    TextTooLongError,
)
from services.tokenizer.template_sandbox import RenderLimits
from tests.unit.tokenizer.small_models import ALTERNATING, HEADERS, JOINING, THINKING, small_model

_HI = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2, 198,
    1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198,
]  # fmt: skip
_TERSE = [1, 9690, 198, 2683, 359, 1733, 313, 30, 2, 198, 1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]
_OPEN_END = {"continue_final_message": True, "add_generation_prompt": False}
_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": "é\\n"}'}}


class _Chat:
    """A model's template and protected tokenizer, without threads."""

    def __init__(self, loaded: LoadedTokenizer, max_characters: int = 100_000, override: Path | None = None) -> None:
        self.loaded = loaded
        self.control = ControlTokens(loaded)
        self.template = ChatTemplate(loaded, self.control, RenderLimits(max_characters), TemplateChoices(override))

    def render(self, messages: Sequence[Mapping[str, object]], **more: object) -> str:
        return self.control.reveal(self.template.render(Conversation(messages, **more)))  # type: ignore[arg-type]

    def ids(self, messages: Sequence[Mapping[str, object]], **more: object) -> list[int]:
        rendered = self.template.render(Conversation(messages, **more))  # type: ignore[arg-type]
        return list(self.control.tokenizer.encode(rendered, add_special_tokens=False).ids)


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> _Chat:
    return _Chat(load_tokenizer(open_model(smollm2_path)))


def _user(text: str = "Hi") -> dict[str, object]:
    return {"role": "user", "content": text}


def _assistant(content: object = "Hello", **more: object) -> dict[str, object]:
    return {"role": "assistant", "content": content, **more}


def test_tok_01_chat_has_the_bos_of_its_template_once(smollm2: _Chat, tmp_path: Path) -> None:
    assert smollm2.ids([_user()]) == _HI
    headers = _Chat(small_model(tmp_path, HEADERS))
    ids = headers.ids([_user(), _assistant("Hello"), _user()])
    assert ids.count(headers.loaded.bos_token_id or -1) == 1
    assert ids[0] == headers.loaded.bos_token_id


_CONVERSATIONS: list[list[dict[str, object]]] = [
    [_user()],
    [{"role": "system", "content": "你是一个助手。"}, _user("  two  blanks \n\n and 🙂\tend ")],
    [
        _user(),
        _assistant("<think>\nhm, a<b\n</think>\n\nYes|No"),
        _user("a <|b|> 'c' \"d\" & <e>"),
    ],
    [_user(), {"role": "assistant", "content": "x", "reasoning_content": "because"}],
    [_user(""), _assistant(""), _user("\n")],
    [
        _user("add"),
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [_CALL | {"function": {"name": "add", "arguments": {"a": 1}}}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "tool", "content": "4", "tool_call_id": "c2"},
    ],
]


@pytest.mark.parametrize("messages", _CONVERSATIONS)
@pytest.mark.parametrize("template", [THINKING, HEADERS, JOINING], ids=["thinking", "headers", "joining"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_harmless_conversations_give_the_ids_of_transformers(
    tmp_path: Path, messages: list[dict[str, object]], template: str, add_generation_prompt: bool
) -> None:
    loaded = small_model(tmp_path, template)
    chat = _Chat(loaded)
    reference = PreTrainedTokenizerFast(
        tokenizer_object=loaded.tokenizer, bos_token="<s>", eos_token="</s>", chat_template=template
    )
    tools = [{"type": "function", "function": {"name": "add", "description": "2+2 <ü>"}}]
    shows_tools = template == THINKING
    if not shows_tools and any("tool_calls" in message for message in messages):
        return  # rendered in the default form: see test_tool_default_form
    for given in (None, tools) if shows_tools else (None,):
        expected = reference.apply_chat_template(
            messages, tools=given, add_generation_prompt=add_generation_prompt, return_dict=False
        )
        assert chat.ids(messages, tools=given, add_generation_prompt=add_generation_prompt) == expected


def test_cht_01_content_as_a_list_of_parts(smollm2: _Chat) -> None:
    def parts(*texts: str) -> list[dict[str, object]]:
        return [{"role": "user", "content": [{"type": "text", "text": text} for text in texts]}]

    assert smollm2.ids(parts("Hi")) == _HI
    assert smollm2.ids(parts("H", "i")) == _HI
    assert smollm2.ids(parts()) == smollm2.ids([_user("")])
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(ConversationError, match="only text parts") as caught:
        smollm2.ids([{"role": "user", "content": [{"type": "text", "text": "Hi"}, image]}])
    assert caught.value.param == "messages[0].content[1]"


def test_cht_02_null_and_absent_content_are_empty(smollm2: _Chat, tmp_path: Path) -> None:
    contents: list[dict[str, object]] = [{"content": None}, {}, {"content": ""}]
    for chat in (smollm2, _Chat(small_model(tmp_path, THINKING))):
        rendered = [
            chat.render(
                [_user(), {"role": "assistant", "tool_calls": [_CALL], **content}, {"role": "tool", "content": "3"}]
            )
            for content in contents
        ]
        assert rendered[0] == rendered[1] == rendered[2]
        assert "None" not in rendered[0]
    assert '"arguments": {"a": 1, "b": "é\\n"}' in rendered[0]


def test_null_fields_are_as_if_absent(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.keys() | list | join(' ') }}{% endfor %}"
    chat = _Chat(small_model(tmp_path, template))
    message = _user() | {"tool_calls": None, "name": None, "id": 5, "reasoning_content": None, "extra": {}}
    assert chat.render([message]) == "role content"
    assert chat.render([_user() | {"tool_calls": []}]) == "role content"
    assert chat.render([_user() | {"name": "Ann", "tool_call_id": "7"}]) == "role content name tool_call_id"


_NO_OBJECTS = ['{"city":', "{", "[1]", "5", '"text"', '{"a": NaN}', "9" * 5000, "[" * 100_000, 5, 0, True, [], ["{}"]]


@pytest.mark.parametrize("arguments", _NO_OBJECTS, ids=lambda arguments: repr(arguments)[:12])
def test_arguments_that_are_no_object_are_refused_by_name(smollm2: _Chat, arguments: object) -> None:
    good, bad = ({"name": "f", "arguments": value} for value in ("{}", arguments))
    spoken: list[tuple[dict[str, object], str]] = [
        ({"tool_calls": [{"function": good}, {"function": bad}]}, "messages[1].tool_calls[1].function.arguments"),
        ({"function_call": bad}, "messages[1].function_call.arguments"),
    ]
    for calls, place in spoken:
        with pytest.raises(ConversationError) as caught:
            smollm2.ids([_user(), {"role": "assistant", **calls}])
        assert caught.value.param == place


@pytest.mark.parametrize("arguments", [None, "", " ", "null", "{}", {}])
def test_a_call_without_arguments_has_an_empty_object(tmp_path: Path, arguments: object) -> None:
    chat = _Chat(small_model(tmp_path, THINKING))
    call = {"function": {"name": "f", "arguments": arguments}}
    assert '"arguments": {}}' in chat.render([_user(), {"role": "assistant", "tool_calls": [call]}])


@pytest.mark.parametrize("calls", ["x", [5], [{}], [{"function": {}}], [{"function": {"name": 1}}]])
def test_tool_calls_of_a_wrong_shape_are_named(smollm2: _Chat, calls: object) -> None:
    with pytest.raises(ConversationError) as caught:
        smollm2.ids([_user(), {"role": "assistant", "tool_calls": calls}])
    assert (caught.value.param or "").startswith("messages[1].tool_calls")


def test_cht_04_model_without_a_template(tmp_path: Path) -> None:
    loaded = small_model(tmp_path, None)
    assert not _Chat(loaded).template.exists
    with pytest.raises(NoChatTemplateError, match=r"no chat template.*--chat-template FILE"):
        _Chat(loaded).render([_user()])
    file = tmp_path / "mine.jinja"
    file.write_text("{% for m in messages %}<|user|>{{ m.content }}{% endfor %}")
    supplied = _Chat(loaded, override=file)
    assert supplied.template.exists
    assert supplied.ids([_user()]) == loaded.tokenizer.encode("<|user|>Hi").ids


def test_operators_template_wins_over_the_models_and_must_be_a_template(tmp_path: Path) -> None:
    file = tmp_path / "mine.jinja"
    file.write_text("mine")
    assert _Chat(small_model(tmp_path, HEADERS), override=file).render([_user()]) == "mine"
    file.write_text("line one\n{% if %}")
    with pytest.raises(ModelFileError, match=r"mine\.jinja: line 2: "):
        _Chat(small_model(tmp_path, HEADERS), override=file)
    with pytest.raises(ModelFileError, match=r"other\.jinja: cannot be read"):
        _Chat(small_model(tmp_path, HEADERS), override=tmp_path / "other.jinja")
    with pytest.raises(ModelFileError, match="chat template 'default' of the model: line 1: "):
        _Chat(small_model(tmp_path, "{{ nonsense"))


def test_cht_05_continue_final_message(smollm2: _Chat) -> None:
    messages = [_user(), _assistant("Sure, the answer")]
    assert smollm2.ids(messages, **_OPEN_END) == [*_HI, 34355, 28, 260, 2988]
    parts = [{"type": "text", "text": "Sure, the"}, {"type": "text", "text": " answer"}]
    assert smollm2.ids([_user(), _assistant(parts)], **_OPEN_END) == [*_HI, 34355, 28, 260, 2988]


def test_cht_05_blanks_at_the_end_stay_if_the_template_keeps_them(smollm2: _Chat, tmp_path: Path) -> None:
    messages = [_user(), _assistant("Well \n")]
    assert smollm2.render(messages, **_OPEN_END).endswith("assistant\nWell \n")
    assert _Chat(small_model(tmp_path, HEADERS)).render(messages, **_OPEN_END).endswith("Well")
    doubled = "{% for m in messages %}{{ m.content }}|{{ m.content }}<|end|>{% endfor %}"
    assert _Chat(small_model(tmp_path, doubled)).render(messages, **_OPEN_END) == "Hi|Hi<|end|>Well \n|Well \n"


def test_cht_05_needs_an_assistants_text_that_is_shown(smollm2: _Chat, tmp_path: Path) -> None:
    for last in (_user(), _assistant(" "), {"role": "assistant", "tool_calls": [_CALL]}):
        with pytest.raises(ConversationError, match="must be the assistant's") as caught:
            smollm2.ids([_user(), last], **_OPEN_END)
        assert caught.value.param == "continue_final_message"
    assistant = _assistant("x")
    with pytest.raises(ConversationError, match="add_generation_prompt"):
        smollm2.ids([_user(), assistant], continue_final_message=True)
    with pytest.raises(ChatTemplateError, match="does not show the last message"):
        _Chat(small_model(tmp_path, "{{ messages[0].content }}")).ids([_user(), assistant], **_OPEN_END)


def test_cht_07_conversation_that_ends_with_the_assistant(smollm2: _Chat) -> None:
    rendered = smollm2.render([_user(), _assistant("Hello")])
    assert rendered.endswith("Hello<|im_end|>\n<|im_start|>assistant\n")


def test_cht_08_developer_is_system_for_a_template_that_does_not_know_it(smollm2: _Chat, tmp_path: Path) -> None:
    assert smollm2.ids([{"role": "developer", "content": "You are terse."}, _user()]) == _TERSE
    assert smollm2.ids([{"role": "system", "content": "You are terse."}, _user()]) == _TERSE
    knows = "{% for m in messages %}{{ 'DEV' if m.role == 'developer' else m.role }} {% endfor %}"
    developer = {"role": "developer", "content": ""}
    assert _Chat(small_model(tmp_path, knows)).render([developer, _user()]) == "DEV user "


@pytest.mark.parametrize("role", ["foo", "", None, 5, "User", "<|im_start|>", ["user"]])
def test_cht_08_unknown_roles_are_refused(smollm2: _Chat, role: object) -> None:
    with pytest.raises(ConversationError, match="role must be one of system, developer, user") as caught:
        smollm2.ids([_user(), {"role": role, "content": "x"}])
    assert caught.value.param == "messages[1].role"


def test_cht_09_the_templates_own_refusal_is_passed_on(tmp_path: Path) -> None:
    chat = _Chat(small_model(tmp_path, ALTERNATING))
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        chat.render([{"role": "system", "content": "x"}, _user()])
    with pytest.raises(ChatTemplateError, match=r"Roles must alternate user/assistant/user/assistant/\.\.\."):
        chat.render([_user(), _user()])
    assert chat.ids([_user("x")])[:2] == [263, 265]


def test_cht_09_an_error_in_the_template_is_a_client_error_without_traceback(tmp_path: Path) -> None:
    for source in ("{{ 1 / 0 }}", "{{ messages[9].content.x }}", "{{ '<|end|>' + 5 }}", "{{ messages | first | sum }}"):
        with pytest.raises(ChatTemplateError, match="cannot render this conversation: ") as caught:
            _Chat(small_model(tmp_path, source)).render([_user()])
        assert "Traceback" not in caught.value.message
        assert len(caught.value.message) <= 500


def test_cht_11_thinking_is_switched_by_template_kwargs(tmp_path: Path) -> None:
    chat = _Chat(small_model(tmp_path, THINKING))
    off = chat.render([_user()], template_kwargs={"enable_thinking": False})
    assert off.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    others: list[dict[str, object]] = [
        {},
        {"enable_thinking": True},
        {"unknown": 1, "other": "x", "none": None, "half": 0.5},
    ]
    for kwargs in others:
        assert chat.render([_user()], template_kwargs=kwargs).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    "kwargs",
    [
        *({name: True} for name in ("messages", "tools", "chat_template", "add_generation_prompt", "documents")),
        *({name: "x"} for name in ("bos_token", "eos_token", "raise_exception", "strftime_now", "namespace", "range")),
        *({name: 1} for name in ("__class__", "_x", "a b", "", "tokenway_tick")),
        *({"x": value} for value in ("y" * 257, 10**7, -(10**7), float("inf"), float("nan"))),
        {"x": {}},
        {"x": []},
        {f"x{index}": 1 for index in range(17)},
    ],
)
def test_cht_11_kwargs_cannot_override_what_is_ours_nor_be_large(tmp_path: Path, kwargs: dict[str, object]) -> None:
    with pytest.raises(ConversationError) as caught:
        _Chat(small_model(tmp_path, THINKING)).render([_user()], template_kwargs=kwargs)
    assert (caught.value.param or "").startswith("chat_template_kwargs")


def test_cht_13_empty_system_text_is_not_the_absence_of_one(smollm2: _Chat) -> None:
    for content in ("", [{"type": "text", "text": ""}], []):
        ids = smollm2.ids([{"role": "system", "content": content}, _user()])
        assert ids[:8] == [1, 9690, 198, 2, 198, 1, 4093, 198]


def test_template_for_tools_is_used_when_there_are_tools(tmp_path: Path) -> None:
    loaded = small_model(tmp_path, "plain")
    loaded.chat_templates["tool_use"] = "with {{ tools | length }} <tool_call>"
    chat = _Chat(loaded)
    assert chat.render([_user()]) == chat.render([_user()], tools=[]) == "plain"
    assert chat.render([_user()], tools=[{"type": "function"}]) == "with 1 <tool_call>"


def _broken_places() -> list[tuple[str, list[dict[str, object]], dict[str, object]]]:
    bad = "a\ud800b"
    call = {"function": {"name": bad, "arguments": "{}"}}
    return [
        ("content", [_user(bad)], {}),
        ("part", [{"role": "user", "content": [{"type": "text", "text": bad}]}], {}),
        ("name", [_user() | {"name": bad}], {}),
        ("call", [_user(), {"role": "assistant", "tool_calls": [call]}], {}),
        ("tool", [_user()], {"tools": [{"function": {"name": bad}}]}),
        ("tool key", [_user()], {"tools": [{bad: 1}]}),
        ("kwarg", [_user()], {"template_kwargs": {"x": bad}}),
    ]


@pytest.mark.parametrize(
    ("place", "messages", "more"), _broken_places(), ids=[place for place, _, _ in _broken_places()]
)
def test_tok_07_half_a_surrogate_pair_is_refused_wherever_it_stands(
    smollm2: _Chat, place: str, messages: list[dict[str, object]], more: dict[str, object]
) -> None:
    assert place
    with pytest.raises(InvalidTextError, match="surrogate pair at character 1") as caught:
        smollm2.ids(messages, **more)
    caught.value.message.encode()


def test_messages_that_cannot_fit_are_refused_before_rendering(tmp_path: Path) -> None:
    chat = _Chat(small_model(tmp_path, "{{ raise_exception('rendered') }}"), max_characters=100)
    with pytest.raises(TextTooLongError, match="at most 100 can fit"):
        chat.render([_user("x" * 50), _user("y" * 51)])


def test_what_the_template_makes_too_long_of_is_named(tmp_path: Path) -> None:
    source = "{% for a in range(50) %}{{ messages }}{{ tools }}{% endfor %}<tool_call>"
    chat = _Chat(small_model(tmp_path, source), max_characters=1000)
    tool = {"type": "function", "function": {"name": "f", "description": "x" * 200}}
    for message, more, param in (
        ("x", {"tools": [tool]}, "tools"),
        ("x", {"tools": [tool], "tools_param": "functions"}, "functions"),
        ("x" * 400, {"tools": [tool]}, "messages"),
        ("x", {}, "messages"),
    ):
        with pytest.raises(TextTooLongError, match="longer than 1000 characters") as caught:
            chat.render([_user(message)], **more)
        assert caught.value.param == param


@pytest.mark.parametrize("messages", [[], ["Hi"], [None]])
def test_messages_of_a_wrong_shape_are_refused(smollm2: _Chat, messages: list[dict[str, object]]) -> None:
    with pytest.raises(ConversationError):
        smollm2.ids(messages)


def test_nesting_without_end_is_refused(smollm2: _Chat) -> None:
    schema: dict[str, object] = {}
    for _ in range(200):
        schema = {"items": schema}
    with pytest.raises(ConversationError, match="nested deeper than 72"):
        smollm2.ids([_user()], tools=[schema])
