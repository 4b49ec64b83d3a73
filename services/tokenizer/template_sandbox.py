"""The sandbox that chat templates run in: immutable arguments, bounded time and memory, no way out.

A template is the operator's or the model author's, but clients choose how often its loops run and how long its texts
get. Extras beyond jinja2 are those that published templates use: `tojson` without escapes, `raise_exception`,
`strftime_now`, `break` and `continue`, and the `generation` block (training marks the assistant's words with it).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

import jinja2
import jinja2.ext
from jinja2 import meta, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

_TICK = "tokenway_tick"
TEMPLATE_GLOBALS = frozenset({_TICK, "raise_exception", "strftime_now", "range", "dict", "lipsum", "cycler", "joiner",
                              "namespace"})  # fmt: skip


class TemplateRefusal(jinja2.TemplateError):
    """The template itself called `raise_exception`."""


class TemplateLimitError(jinja2.TemplateError):
    """Rendering ran into its limit of time or size."""


class TemplateSizeError(TemplateLimitError):
    """A text that the template makes is too large."""


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """Bounds of one rendering.

    Attributes:
        max_characters: Of the result and of any text that `+` or `*` makes on the way.
        max_cpu_s: Of this thread's processor time.
    """

    max_characters: int
    max_cpu_s: float = 2.0


class CompiledTemplate:
    """One template, its literals rewritten by `rewrite`, ready to render many times from any thread.

    Attributes:
        variables: What the template looks at of the variables that it is given.
    """

    def __init__(self, source: str, rewrite: Callable[[str], str], limits: RenderLimits) -> None:
        """Parse and compile.

        Raises:
            jinja2.TemplateSyntaxError: the source is not a template.
        """
        self._limits = limits
        environment = _environment(limits)
        tree = environment.parse(source)
        self.variables = frozenset(meta.find_undeclared_variables(tree))
        _rewrite_literals(tree, rewrite)
        _tick_in_loops(tree)
        code = environment.compile(tree, filename="<chat template>")
        self._template = jinja2.Template.from_code(environment, code, environment.make_globals(None))

    def render(self, variables: Mapping[str, object]) -> str:
        """Render within the limits.

        Raises:
            TemplateRefusal: the template called raise_exception; its words are the message.
            TemplateLimitError: too long or too large.
            Exception: whatever else the template runs into, of any type.
        """
        deadline = time.thread_time() + self._limits.max_cpu_s

        def tick() -> None:
            if time.thread_time() > deadline:
                raise TemplateLimitError(f"rendering took longer than {self._limits.max_cpu_s:g} s")

        pieces: list[str] = []
        num_characters = 0
        for piece in self._template.generate({**variables, _TICK: tick}):
            num_characters += len(piece)
            _check_size(num_characters, self._limits)
            pieces.append(piece)
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*"})

    def __init__(self, limits: RenderLimits) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock])
        self._limits = limits

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: object, right: object) -> object:
        if operator == "*":
            _check_size(_length(left) * _factor(right) + _length(right) * _factor(left), self._limits)
        else:
            _check_size(_length(left) + _length(right), self._limits)
        result: object = super().call_binop(context, operator, left, right)
        return result


class _GenerationBlock(jinja2.ext.Extension):
    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(limits: RenderLimits) -> _Environment:
    environment = _Environment(limits)
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> None:
    raise TemplateRefusal(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _rewrite_literals(tree: nodes.Template, rewrite: Callable[[str], str]) -> None:
    for data in tree.find_all(nodes.TemplateData):
        data.data = rewrite(data.data)
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str):
            constant.value = rewrite(constant.value)


def _tick_in_loops(tree: nodes.Template) -> None:
    """Look at the clock in every round of a loop and every call of a macro: all that a template can repeat."""
    repeated: Iterable[nodes.For | nodes.Macro | nodes.CallBlock] = tree.find_all(
        (nodes.For, nodes.Macro, nodes.CallBlock)
    )
    for node in repeated:
        call = nodes.Call(nodes.Name(_TICK, "load"), [], [], None, None)
        statement = nodes.ExprStmt(call)
        statement.set_lineno(node.lineno)
        node.body.insert(0, statement)


def _check_size(num_characters: int, limits: RenderLimits) -> None:
    if num_characters > limits.max_characters:
        raise TemplateSizeError(f"the rendered text is longer than {limits.max_characters} characters")


def _length(value: object) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _factor(value: object) -> int:
    return max(value, 0) if isinstance(value, int) else 0
