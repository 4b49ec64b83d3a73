"""Chat templates in the manner of model families: small, but with what tells the families apart."""

from __future__ import annotations

QWEN25 = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
{{- 'Answer with <tool_call>\\n{"name": <name>, "arguments": <args-json-object>}\\n</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>' + call.function | tojson + '</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

QWEN3 = QWEN25 + (
    "{%- if add_generation_prompt and enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
)

# Opens the block itself, as models that always think have it.
QWEN3_THINKING = QWEN25 + "{%- if add_generation_prompt %}{{- '<think>\\n' }}{%- endif %}{#- </think> #}"

LLAMA3 = """\
{{- bos_token }}
{%- if tools %}{{- 'Respond in the format {"name": function name, "parameters": dictionary of arguments}.' }}
{%- for tool in tools %}{{- tool | tojson }}{%- endfor %}{%- endif %}
{%- for m in messages %}
{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- call.function | tojson }}{%- endfor %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

_MISTRAL = """\
{{- bos_token }}
{%- if tools %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{%- for m in messages %}
{%- if m.role == 'user' %}{{- '[INST] ' + m.content + ' [/INST]' }}
{%- elif m.tool_calls %}{%- for call in m.tool_calls %}CALL{%- endfor %}{{- eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id | length != 9 %}{{- raise_exception('Tool call IDs should be alphanumeric, 9 long') }}{%- endif %}
{{- '[TOOL_RESULTS] ' + m.content + '[/TOOL_RESULTS]' }}
{%- else %}{{- m.content + eos_token }}{%- endif %}
{%- endfor %}"""
MISTRAL = _MISTRAL.replace(
    "CALL", "{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson }}"
)
MISTRAL_LIST = _MISTRAL.replace("CALL", "{{- '[TOOL_CALLS] [' + call.function | tojson + ']' }}")

PYTHONIC = """\
{%- if tools %}
{{- 'Answer with [func_name1(params_name1=params_value1), func_name2(params)]' + tools | tojson }}
{%- endif %}
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{- call.function.name + '()' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Shows no tools; SmolLM2 has one like it.
PLAIN = """\
{%- for m in messages %}{{- '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

# Shows tools, but in a form that is none of the known ones.
XML = PLAIN + "{%- if tools %}{{- '<tool_call>\\n<function=example_function_name>' + tools | tojson }}{%- endif %}"
