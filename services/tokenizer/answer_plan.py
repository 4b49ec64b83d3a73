"""Tokenizer process: what of a chat decides how its answers are held to a form and read again.

    tools, thoughts, structure, the prompt's end -> grammar (what the model may write) and parsers (what it wrote)

One `AnswerPlanner` for the served model. Pure but for the drawing of call ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from services.model_files.tokenizer import LoadedTokenizer
from services.tokenizer.answer_parts import AnswerParser, ParserFactory
from services.tokenizer.api_error import Code, bad_field
from services.tokenizer.conversation import Conversation
from services.tokenizer.dialect import Dialect
from services.tokenizer.openai_schema import ChatBody
from services.tokenizer.reasoning import DEFAULT_MARKS, PlainText, ReasoningMarks, ReasoningParser, ReasoningWish
from services.tokenizer.structured_body import check_beside_grammar
from services.tokenizer.structured_output import StructureLimits
from services.tokenizer.tool_families import HERMES, ToolFamily
from services.tokenizer.tool_grammar import GrammarFrame, GrammarSetting, Thinking, answer_grammar
from services.tokenizer.tool_parts import AnswerParts, CallRules
from services.tokenizer.tool_requests import ToolUse
from services.tokenizer.tool_source import GeneratorParser
from services.wire.request_params import Grammar

_PROMPT_END_TOKENS = 24  # a mark of thoughts and the blanks behind it
_MAX_GRAMMAR_BYTES = 1024 * 1024  # of a message to the scheduler


def conversation_of(body: ChatBody, use: ToolUse | None, dialect: Dialect) -> Conversation:
    """What a chat wants rendered."""
    opens_turn = body.add_generation_prompt
    switches = {**effort_switches(body.reasoning_effort, dialect), **(body.chat_template_kwargs or {})}
    return Conversation(
        messages=body.messages,
        tools=None if use is None else [function.rendered() for function in use.functions],
        template_kwargs=switches,
        add_generation_prompt=not body.continue_final_message if opens_turn is None else opens_turn,
        continue_final_message=bool(body.continue_final_message),
        tools_param="tools" if use is None or not use.is_legacy else "functions",
    )


@dataclass(frozen=True)
class AnswerPlan:
    """What `generation` needs beside a prompt.

    Attributes:
        parsers: Makes the parser of each answer; None gives texts as they are.
        grammar: What each answer must be a sentence of.
        shows_special_tokens: Whether the parsers need control tokens in the text.
    """

    parsers: ParserFactory | None = None
    grammar: Grammar | None = None
    shows_special_tokens: bool = False


class AnswerPlanner:
    """Plans the answers of one model's chats."""

    def __init__(self, loaded: LoadedTokenizer, dialect: Dialect, limits: StructureLimits) -> None:
        self._vocabulary = loaded.vocabulary
        self._dialect = dialect
        control_ids = {token.content: token.token_id for token in loaded.control_tokens}
        self._setting = GrammarSetting(control_ids, limits.schema, limits.is_compact)

    def plan(
        self, body: ChatBody, use: ToolUse | None, prompt_token_ids: Sequence[int], structure: Grammar | None
    ) -> AnswerPlan:
        """How the answers to a chat are held and read.

        Args:
            body: Its fields.
            use: Its tools.
            prompt_token_ids: The prompt; its end tells whether the model is thinking already.
            structure: What another field asks the answers to be.

        Raises:
            ApiError: 400 naming the field: tools are turned off, or a schema that cannot be kept.
        """
        dialect, marks = self._dialect, self._dialect.marks
        if use is not None and dialect.family is None:
            raise bad_field("tools", "are turned off on this server", Code.UNSUPPORTED_VALUE)
        thinking = Thinking.NONE if marks is None else self._thinking(marks, body, prompt_token_ids)
        frame = GrammarFrame(self._setting, thinking, marks or DEFAULT_MARKS)
        family = dialect.family or HERMES
        grammar = answer_grammar(frame, family.form, use, structure)
        _check_grammar(grammar, body)
        wish = reasoning_wish(body)
        shown_marks = [*(family.marks if use is not None else ())]
        must_call = use is not None and use.must_call
        if marks is not None and (wish.is_separate or must_call):  # else thoughts are text like any other
            shown_marks += [marks.opening, marks.closing]
        else:
            marks = None
        if use is None and marks is None:
            return AnswerPlan(grammar=grammar)
        parsers = _parsers(family, use, marks, wish, thinking is Thinking.IS_OPEN)
        return AnswerPlan(parsers, grammar, not self._setting.control_ids.keys().isdisjoint(shown_marks))

    def _thinking(self, marks: ReasoningMarks, body: ChatBody, prompt_token_ids: Sequence[int]) -> Thinking:
        if body.continue_final_message:
            content = body.messages[-1].get("content")
            is_open = isinstance(content, str) and marks.are_left_open_in(content)
            return Thinking.IS_OPEN if is_open else Thinking.NONE
        token_bytes = map(self._vocabulary.token_bytes, prompt_token_ids[-_PROMPT_END_TOKENS:])
        prompt_end = b"".join(token_bytes).decode(errors="replace")
        if marks.are_open_at(prompt_end):
            return Thinking.IS_OPEN
        is_off = (body.chat_template_kwargs or {}).get("enable_thinking") is False
        return Thinking.NONE if is_off or marks.are_closed_at(prompt_end) else Thinking.MAY_COME


def _check_grammar(grammar: Grammar | None, body: ChatBody) -> None:
    if grammar is None:
        return
    num_bytes = len(grammar.text.encode())
    if num_bytes > _MAX_GRAMMAR_BYTES:
        problem = f"the schemas make a grammar of {num_bytes} bytes, at most {_MAX_GRAMMAR_BYTES} are taken"
        raise bad_field("functions" if body.functions else "tools", problem)
    check_beside_grammar(body, grammar)


def reasoning_wish(body: ChatBody) -> ReasoningWish:
    """What a chat's fields say of thoughts."""
    return ReasoningWish(
        is_separate=body.separate_reasoning is not False,
        is_shown=body.include_reasoning is not False,
        is_streamed=body.stream_reasoning is not False,
    )


def effort_switches(effort: str | None, dialect: Dialect) -> Mapping[str, object]:
    """How the template is told of `reasoning_effort`; empty when it would not look at it."""
    if effort is None:
        return {}
    switches: dict[str, object] = {"reasoning_effort": effort}
    if effort == "none":
        switches["enable_thinking"] = False
    return {name: value for name, value in switches.items() if name in dialect.switches}


def unused_switches(body: ChatBody, dialect: Dialect) -> list[str]:
    """The fields for the template that it does not look at, and that nothing else depends on."""
    effort, given = body.reasoning_effort, body.chat_template_kwargs or {}
    unused = ["reasoning_effort"] if effort is not None and not effort_switches(effort, dialect) else []
    if dialect.marks is not None and given.get("enable_thinking") is False:  # a grammar leaves no room for thoughts
        given = {name: value for name, value in given.items() if name != "enable_thinking"}
    return [*unused, *(f"chat_template_kwargs.{name}" for name in given if name not in dialect.switches)]


def _parsers(
    family: ToolFamily, use: ToolUse | None, marks: ReasoningMarks | None, wish: ReasoningWish, is_open: bool
) -> ParserFactory:
    def new_calls() -> AnswerParser:
        if use is None:
            return PlainText()
        rules = CallRules(use.names, family.new_call_id, use.max_calls, has_text=not use.must_call)
        return GeneratorParser(family.read, AnswerParts(rules))

    def new_parser() -> AnswerParser:
        return new_calls() if marks is None else ReasoningParser(marks, wish, is_open, new_calls())

    return new_parser
