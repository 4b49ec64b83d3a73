"""Byte-level tokenizers with chosen control tokens and templates in the manner of published ones."""

from __future__ import annotations

from pathlib import Path

from services.model_files.source import open_model
from services.model_files.tokenizer import LoadedTokenizer, load_tokenizer
from tests.unit.model_files.gguf_files import tokenizer_fields, write_gguf
from tests.unit.model_files.trained_vocabularies import spell_bytes

# Turns with thinking and tools, as Qwen3 has them: looks into contents, splits at </think>, prints JSON.
THINKING = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- '# Tools\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for m in messages %}{%- if m.role == 'user' %}{%- set ns.last_user = loop.index0 %}{%- endif %}{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'user' or (m.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set text, thoughts = m.content, '' %}
        {%- if m.reasoning_content is string %}
            {%- set thoughts = m.reasoning_content %}
        {%- elif '</think>' in text %}
            {%- set thoughts = text.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set text = text.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last_user and thoughts %}
            {{- '<think>\\n' + thoughts + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- text }}
        {%- for call in m.tool_calls or [] %}
            {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {%- if call.function.arguments is string %}{{- call.function.arguments }}
            {%- else %}{{- call.function.arguments | tojson }}{%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif m.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

# BOS from a variable, contents trimmed, as Llama 3 has it.
HEADERS = """\
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m['role'] + '<|end_header_id|>\\n\\n' + m['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

# Strict turns without a system role, as the first Mistrals had it.
ALTERNATING = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'system' %}{{- raise_exception('System role not supported') }}{%- endif %}
    {%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate user/assistant/user/assistant/...') }}
    {%- endif %}
    {%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
    {%- else %}{{- m.content + eos_token }}{%- endif %}
{%- endfor %}"""

# Control tokens put together from pieces, as Phi-3 has it.
ASSEMBLED = """\
{%- for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"""

# Joins clients' texts with nothing between, and takes letters out of them.
JOINING = """\
{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{{ m.name }}{{ m.content | replace('x', '') }}<|im_end|>
{% endfor %}"""

CONTROL = [
    "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<s>", "</s>",
    "[INST]", "[/INST]", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "PAD",
]  # fmt: skip
USER_DEFINED = ["<think>", "</think>", "<tool_call>", "</tool_call>"]


def small_model(folder: Path, template: str | None) -> LoadedTokenizer:
    """Load a tokenizer of 256 bytes and the tokens above, ids from 256 up in their order, BOS `<s>`, EOS `</s>`."""
    tokens = [*(spell_bytes(bytes([byte])) for byte in range(256)), *CONTROL, *USER_DEFINED, "he"]
    kinds = [1] * 256 + [3] * len(CONTROL) + [4] * len(USER_DEFINED) + [1]
    ends = {"bos_token_id": tokens.index("<s>"), "eos_token_id": tokens.index("</s>")}
    fields = tokenizer_fields(tokens, kinds, "gpt2", "gpt-2", merges=["h e"], **ends)
    if template is not None:
        fields["tokenizer.chat_template"] = template
    return load_tokenizer(open_model(write_gguf(folder / "small.gguf", metadata=fields)))
