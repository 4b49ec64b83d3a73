r"""Renders conversations through a model's chat template so that no client can write a control token.

    model's template --rewrite literals--> `NAME system\n...`   NAMEs: private, random (see control_tokens)
    client's messages ------ as they are ----^                  a client's "<|im_end|>" stays plain text

The result is for the protected tokenizer only. Templates see the clients' real text, so whatever they do with it (trim,
split at `</think>`, look for a prefix) works as published. A few templates do not spell a control token out but put it
together (`'<|' + role + '|>'`); these are found at rendering time and handled by a second, shielded rendering.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field, replace
from pathlib import Path

import jinja2

from services.model_files.errors import ModelFileError
from services.model_files.source import read_text
from services.model_files.tokenizer import LoadedTokenizer
from services.tokenizer.control_tokens import ControlTokens, draw_private_text
from services.tokenizer.conversation import (
    Conversation,
    Message,
    TextMapping,
    check_text,
    checked_template_kwargs,
    map_texts,
    marked,
    template_messages,
)
from services.tokenizer.dialect import Dialect, DialectNames, dialect_of
from services.tokenizer.prompt_errors import (
    ChatTemplateError,
    ConversationError,
    InvalidTextError,
    NoChatTemplateError,
    TextTooLongError,
)
from services.tokenizer.template_sandbox import (
    TEMPLATE_GLOBALS,
    CompiledTemplate,
    RenderLimits,
    TemplateLimitError,
    TemplateRefusal,
    TemplateSizeError,
)
from services.tokenizer.tool_default_form import in_default_form

_MAX_ERROR_CHARACTERS = 500
_RESERVED_NAMES = TEMPLATE_GLOBALS | {
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize",
    "bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Variables:
    """The part of a template's variables that holds clients' text."""

    messages: list[Message]
    tools: list[object] | None
    kwargs: dict[str, object]

    def mapped(self, mapping: TextMapping) -> _Variables:
        """Replace all that a client can choose freely, so not the roles."""
        messages, tools, kwargs = (map_texts(value, mapping) for value in (self.messages, self.tools, self.kwargs))
        roles = [message["role"] for message in self.messages]
        return _Variables(
            [{**message, "role": role} for message, role in zip(messages, roles, strict=True)],  # type: ignore[call-overload]
            tools,  # type: ignore[arg-type]  # map_texts keeps the shape
            kwargs,  # type: ignore[arg-type]
        )


class _TextCheck:
    """Checks every text of a conversation and collects them."""

    def __init__(self, control: ControlTokens) -> None:
        self._control = control
        self.texts: list[str] = []

    def value(self, text: str) -> str:
        check_text(text, "messages")
        if self._control.holds_private_name(text):
            raise InvalidTextError("the text holds reserved private-use characters", "messages")
        self.texts.append(text)
        return text

    key = value


@dataclass(frozen=True)
class TemplateChoices:
    """What an operator says of a model's chat template.

    Attributes:
        override: A template file in place of the model's.
        names: How the model writes calls and thoughts, where it is not to be found out from the template.
    """

    override: Path | None = None
    names: DialectNames = field(default_factory=DialectNames)


class ChatTemplate:
    """The chat templates of a model; safe to use from several threads at once.

    Attributes:
        dialect: How the model writes calls and thoughts.
    """

    def __init__(
        self,
        loaded: LoadedTokenizer,
        control: ControlTokens,
        limits: RenderLimits,
        choices: TemplateChoices | None = None,
    ) -> None:
        """Compile the model's templates, or the operator's in their place.

        Raises:
            ModelFileError: a template cannot be read or has a syntax error (names it and the line), or does not go with
                the operator's choices.
        """
        choices = choices or TemplateChoices()
        override = choices.override
        self._control = control
        self._limits = limits
        self._sources = loaded.chat_templates if override is None else {"default": read_text(override)}
        self._special_texts = {name: control.protect(text) for name, text in loaded.special_texts.items()}
        self._compiled = {
            name: self._compile(override or Path(f"chat template {name!r} of the model"), source)
            for name, source in self._sources.items()
        }
        variables = {name: template.variables for name, template in self._compiled.items()}
        self.dialect: Dialect = dialect_of(self._sources, variables, choices.names)
        self._takes_system = {name: self._can_render_system(name) for name in self._compiled}

    @property
    def exists(self) -> bool:
        """Whether chat requests can be served at all."""
        return "default" in self._compiled

    def render(self, conversation: Conversation) -> str:
        """Return the prompt's text for the protected tokenizer: control tokens stand under their private names.

        Raises:
            NoChatTemplateError: the model has none and the operator gave none.
            ConversationError: a message, tool or argument has the wrong shape or an unknown role.
            InvalidTextError: a text holds half of a surrogate pair.
            TextTooLongError: the conversation, or what the template makes of it, cannot fit the context; `param` is
                the field of the tools where these are the larger part.
            ChatTemplateError: the template refused the conversation or failed on it.
        """
        name, variables = self._prepared(conversation)
        try:
            texts = self._checked_texts(variables)
            rendered = self._render(name, conversation, variables)
            if not self._control.spelled_out(rendered):
                return rendered
            return self._name_assembled_tokens(name, conversation, variables, texts) or rendered
        except TextTooLongError as error:
            error.param = conversation.longest_field
            raise

    def dropped_keys(self, conversation: Conversation) -> list[str]:
        """Return which of tool calls, thoughts and tools' answers the template leaves out of at least one message.

        The conversation is one that `render` took. It is rendered again with a mark in each of these, and a mark that
        does not come out was not shown. The places are `messages[].tool_calls`, `messages[].reasoning_content` and
        `messages[tool].content`.
        """
        name, variables = self._prepared(conversation)
        messages, places = marked(variables.messages, lambda: secrets.token_hex(8))
        try:
            rendered = self._render(name, conversation, replace(variables, messages=messages))
        except (ChatTemplateError, TextTooLongError):
            return []  # a template that objects to a mark has looked at it
        return list(dict.fromkeys(place for mark, place in places.items() if mark not in rendered))

    def _prepared(self, conversation: Conversation) -> tuple[str, _Variables]:
        """The name of the template for a conversation, and its variables, checked."""
        has_own = self.dialect.shows_tools and "tool_use" in self._compiled
        name = "tool_use" if conversation.tools and has_own else "default"
        if name not in self._compiled:
            raise NoChatTemplateError(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template FILE"
            )
        variables = _Variables(
            messages=template_messages(conversation, "developer" in self._sources[name]),
            tools=list(conversation.tools) if conversation.tools else None,
            kwargs=checked_template_kwargs(conversation, _RESERVED_NAMES),
        )
        return name, variables

    def _checked_texts(self, variables: _Variables) -> list[str]:
        check = _TextCheck(self._control)
        variables.mapped(check)
        num_characters = sum(map(len, check.texts))
        if num_characters > self._limits.max_characters:
            raise TextTooLongError(
                f"the conversation has {num_characters} characters, at most {self._limits.max_characters} can fit"
            )
        return check.texts

    def _name_assembled_tokens(
        self, name: str, conversation: Conversation, variables: _Variables, texts: list[str]
    ) -> str | None:
        """Render once more with the clients' text shielded; return None if then no control token is spelled out.

        A public spelling in the result came from a client, or from a template that puts control tokens together. With
        the shield, a client's text lacks every first and last character of a control token, and no text of a client is
        a part of one: what is found now is the template's, gets its private name, and only then the shield comes off.
        """
        shield = self._control.shield(texts)
        shielded = self._render(name, conversation, variables.mapped(shield))
        if not shield.spelled_out(shielded):
            return None
        return shield.lowered(shield.protect(shielded))

    def _render(self, name: str, conversation: Conversation, variables: _Variables) -> str:
        mark = draw_private_text(8)
        messages = variables.messages
        if conversation.continue_final_message:
            messages = [*messages[:-1], _with_mark(messages[-1], mark, conversation)]
        tools = variables.tools
        if not self.dialect.shows_tools:
            messages, tools = in_default_form(messages, tools, takes_system=self._takes_system[name]), None
        text = self._run(name, {
            **self._special_texts,
            **variables.kwargs,
            "messages": messages,
            "tools": tools,
            "documents": None,
            "add_generation_prompt": conversation.add_generation_prompt,
        })  # fmt: skip
        return _cut_at_mark(text, mark, variables.messages[-1]) if conversation.continue_final_message else text

    def _can_render_system(self, name: str) -> bool:
        roles = ("system", "user")
        variables = {"messages": [{"role": role, "content": "x"} for role in roles], "add_generation_prompt": True}
        try:
            self._run(name, {**self._special_texts, "tools": None, **variables})
        except (ChatTemplateError, TextTooLongError):
            return False
        return True

    def _run(self, name: str, variables: dict[str, object]) -> str:
        try:
            return self._compiled[name].render(variables)
        except TemplateRefusal as error:
            problem = f"the chat template refuses this conversation: {error}"
        except TemplateSizeError as error:
            raise TextTooLongError(f"the conversation does not fit: {error}") from None
        except TemplateLimitError as error:
            problem = f"the chat template was stopped: {error}"
        except Exception as error:  # templates run into errors of any type, by what clients send them
            problem = f"the chat template cannot render this conversation: {error}"
        raise ChatTemplateError(self._control.reveal(problem)[:_MAX_ERROR_CHARACTERS], "messages")

    def _compile(self, origin: Path, source: str) -> CompiledTemplate:
        try:
            return CompiledTemplate(source, self._control.protect, self._limits)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(origin, f"line {error.lineno}: {error.message}") from None


def _with_mark(message: Message, mark: str, conversation: Conversation) -> Message:
    content = message["content"]
    if conversation.add_generation_prompt:
        raise ConversationError("cannot be combined with add_generation_prompt", "continue_final_message")
    if message["role"] != "assistant" or not isinstance(content, str) or not content.strip():
        raise ConversationError("the last message must be the assistant's and hold text", "continue_final_message")
    kept = content.rstrip()
    return {**message, "content": kept + mark + content[len(kept) :]}


def _cut_at_mark(text: str, mark: str, message: Message) -> str:
    """End the text where the last message's content ends, with its trailing blanks if the template keeps them."""
    before, found, after = text.rpartition(mark)
    if not found:
        raise ChatTemplateError("the chat template does not show the last message", "continue_final_message")
    content = str(message["content"])
    blanks = content[len(content.rstrip()) :]
    return before.replace(mark, "") + (blanks if after.startswith(blanks) else "")
