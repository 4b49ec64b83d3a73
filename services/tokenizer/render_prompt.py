"""Tokenizer process, without a server: what a model would see of one chat. Reads a chat body, prints one JSON object.

    python -m services.tokenizer.render_prompt < body.json      with the settings of a tokenizer in its environment

The object is that of the route /v1/chat/completions/render, or `{"error": ...}` with status 1. It is made of the same
parts as a request's prompt, so it is what the server would give.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from services.model_files.errors import ModelFileError
from services.model_files.source import open_model
from services.model_files.tokenizer import load_tokenizer
from services.runtime.config import Settings, SettingsError, load_settings
from services.runtime.service import StartError
from services.tokenizer.answer_plan import conversation_of
from services.tokenizer.api_error import ApiError
from services.tokenizer.dialect import DialectNames
from services.tokenizer.json_schema_check import SchemaLimits
from services.tokenizer.openai_schema import parse_chat
from services.tokenizer.prompt_errors import PromptError
from services.tokenizer.text_encoder import EncoderSettings, TextEncoder
from services.tokenizer.tool_requests import tool_use_of

_UNKNOWN_CONTEXT = 1 << 20  # of a model whose files do not say: only to have a limit


async def render(fields: Mapping[str, object], settings: Settings) -> dict[str, object]:
    """The prompt that a chat becomes.

    Raises:
        ModelFileError: the model's files are missing or damaged.
        ApiError: a field is wrong.
        PromptError: the messages cannot be rendered.
    """
    files = open_model(settings.model)
    loaded = load_tokenizer(files)
    context = files.config.get("max_position_embeddings")
    max_tokens = settings.max_model_len or (context if type(context) is int else _UNKNOWN_CONTEXT)
    template = Path(settings.chat_template) if settings.chat_template else None
    names = DialectNames(settings.tool_call_parser, settings.reasoning_parser)
    encoder = TextEncoder(loaded, EncoderSettings(max_tokens, chat_template=template, dialect_names=names))
    try:
        body, _ = parse_chat(fields, settings)
        use = tool_use_of(body, SchemaLimits.of(settings))
        conversation = conversation_of(body, use, encoder.template.dialect)
        token_ids = await encoder.encode_chat(conversation)
        return {
            "text": await encoder.render_chat(conversation),
            "token_ids": token_ids,
            "token_strs": [loaded.tokenizer.id_to_token(token_id) or "" for token_id in token_ids],
            "count": len(token_ids),
            "max_model_len": max_tokens,
        }
    finally:
        encoder.close()


def main() -> int:
    """Renders what comes in; the exit status."""
    try:
        fields = json.loads(sys.stdin.buffer.read())
        if not isinstance(fields, dict):
            raise SettingsError("the chat is not a JSON object")
        found = asyncio.run(render(fields, load_settings([])))
    except ApiError as error:
        found = {"error": error.message}
    except (ModelFileError, PromptError, SettingsError, StartError, ValueError) as error:
        found = {"error": str(error)}
    print(json.dumps(found))
    return 1 if "error" in found else 0


if __name__ == "__main__":
    sys.exit(main())
