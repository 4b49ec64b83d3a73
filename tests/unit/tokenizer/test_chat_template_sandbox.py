"""Templates run in bounded time and memory and reach nothing outside."""

from __future__ import annotations

from datetime import datetime

import jinja2
import pytest

from services.tokenizer.template_sandbox import CompiledTemplate, RenderLimits, TemplateLimitError, TemplateRefusal


def _render(source: str, max_characters: int = 10_000, max_cpu_s: float = 0.2, **variables: object) -> str:
    return CompiledTemplate(source, lambda text: text, RenderLimits(max_characters, max_cpu_s)).render(variables)


def test_extras_of_published_templates_work() -> None:
    assert _render("{{ x | tojson }}", x={"k": ["é<>&'\"", 1, None, True]}) == '{"k": ["é<>&\'\\"", 1, null, true]}'
    assert _render("{{ x | tojson(indent=2) }}", x=[1]) == "[\n  1\n]"
    assert _render("{{ x | tojson(sort_keys=true, separators=(',', ':')) }}", x={"b": 1, "a": 2}) == '{"a":2,"b":1}'
    assert _render("{{ x | tojson(ensure_ascii=true) }}", x="é") == '"\\u00e9"'
    odd = "{% for i in x %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert _render(odd, x=[1, 2, 3, 4, 5]) == "13"
    assert _render("a{% generation %}{{ x }}{% endgeneration %}b", x="!") == "a!b"
    assert _render("{{ strftime_now('%Y') }}") in (str(datetime.now().year), str(datetime.now().year - 1))
    with pytest.raises(TemplateRefusal, match="no way"):
        _render("{{ raise_exception('no way') }}")


def test_blocks_are_trimmed_as_transformers_trims_them() -> None:
    assert _render("  {% if true %}\n  a\n  {% endif %}\nb\n") == "  a\nb"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ x.__init__.__globals__ }}",
        "{{ [].append.__self__.__class__ }}",
        "{{ '{0.__class__}'.format(x) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ x | attr('__class__') }}",
        "{{ tokenway_tick.__closure__ }}",
    ],
)
def test_nothing_outside_can_be_reached(source: str) -> None:
    try:
        text = _render(source, x={})
    except (jinja2.exceptions.SecurityError, jinja2.UndefinedError):
        return
    assert text == ""


@pytest.mark.parametrize(
    "source", ["{{ x.append(1) }}", "{{ y.update({'a': 1}) }}", "{{ y.pop('k') }}", "{% set y.k = 2 %}"]
)
def test_arguments_cannot_be_changed(source: str) -> None:
    x: list[int] = []
    y = {"k": 1}
    with pytest.raises(jinja2.TemplateError):
        _render(source, x=x, y=y)
    assert (x, y) == ([], {"k": 1})


@pytest.mark.parametrize("source", ["{% include 'a' %}", "{% import 'a' as b %}", "{% extends 'a' %}"])
def test_no_other_file_is_read(source: str) -> None:
    with pytest.raises(TypeError, match="no loader"):
        _render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
        "{% macro f() %}{% endmacro %}{% for a in range(9999) %}{% for b in x %}{{ f() }}{% endfor %}{% endfor %}",
        "{% for a in x %}{% set t %}{% for b in x %}{{ b }}{% endfor %}{% endset %}{% endfor %}",
        "{% for a in x %}{% for b in x %}{% for c in x %}{% if c == 'no' %}{{ c }}{% endif %}{% endfor %}{% endfor %}"
        "{% endfor %}",
    ],
)
def test_loops_without_end_are_stopped(source: str) -> None:
    with pytest.raises(TemplateLimitError, match=r"took longer than 0\.2 s"):
        _render(source, x=["yes"] * 4000)


@pytest.mark.parametrize(
    "source",
    ["{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{% for a in x recursive %}{{ loop(x) }}{% endfor %}"],
)
def test_recursion_without_end_is_an_error_not_a_crash(source: str) -> None:
    with pytest.raises((RecursionError, TemplateLimitError)):
        _render(source, x=["yes"] * 10)


@pytest.mark.parametrize(
    "source",
    [
        "{% for a in range(9999) %}{{ x }}{% endfor %}",
        "{{ x * 1000000000 }}",
        "{{ 1000000000 * x }}",
        "{{ [x] * 1000000000 }}",
        "{% set ns = namespace(t=x) %}{% for a in range(99) %}{% set ns.t = ns.t + ns.t %}{% endfor %}",
    ],
)
def test_output_without_end_is_stopped(source: str) -> None:
    with pytest.raises(TemplateLimitError, match="longer than 10000 characters"):
        _render(source, x="0123456789")


def test_ordinary_sums_and_products_are_left_alone() -> None:
    assert _render("{{ 6 * 7 }} {{ 'ab' * 3 }} {{ 2 * 'a' }} {{ x + [2] }} {{ -1 * 'a' }}|{{ 1.5 + 1 }}", x=[1]) == (
        "42 ababab aa [1, 2] |2.5"
    )


def test_rewriting_reaches_text_and_constants_but_no_variable() -> None:
    template = CompiledTemplate(
        "A{% if x == 'A' %}{{ 'A' + x }}{% endif %}{# A #}{{ {'A': 'A'}['A'] }}{% raw %}{{ A }}{% endraw %}",
        lambda text: text.replace("A", "B"),
        RenderLimits(1000),
    )
    assert template.render({"x": "B"}) == "BBBB{{ B }}"
    assert template.render({"x": "A"}) == "BB{{ B }}"
