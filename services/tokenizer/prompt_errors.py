"""What can be wrong with a prompt: each is the client's to mend (400), but for the last two."""

from __future__ import annotations


class PromptError(ValueError):
    """A prompt cannot be made into token ids, by the client's fault: a 400.

    Attributes:
        message: For the client, one line, without internals.
        param: The field at fault as the OpenAI error body names it, such as `messages[2].role`; None if unknown.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        """Keep the message and the field at fault."""
        self.message = message
        self.param = param
        super().__init__(message)


class InvalidTextError(PromptError):
    """The text cannot be written as UTF-8: it holds half of a surrogate pair."""


class TextTooLongError(PromptError):
    """The text has more bytes than the context could hold of the longest token; it was not encoded."""


class ConversationError(PromptError):
    """A message, a tool or a template argument has a shape that cannot be rendered."""


class MissingKeyError(ConversationError):
    """A message lacks a key that it must have."""


class ChatTemplateError(PromptError):
    """The chat template refused the conversation (its own words are in the message) or failed on it."""


class NoChatTemplateError(PromptError):
    """The model has no chat template and the operator supplied none."""


class EncodingFailedError(RuntimeError):
    """The tokenizers library failed on this text: a 500 for this request alone."""


class EncoderBusyError(RuntimeError):
    """As many long texts as allowed are waiting to be encoded: a 503, the client may try again."""
