"""A request's way as lines: what it was, a row for each hop, and a bar that shows when. Pure.

    HOP       PROCESS       WAIT ms  WORK ms  COUNTERS             |  ░░░██████            |

`░` is waiting, `█` work; the bar spans the request from its first byte to its last.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.launcher.errors import CommandError
from services.launcher.terminal import aligned

_LEAST_BAR, _MOST_BAR = 10, 60
_WAIT, _WORK = "░", "█"
_SHOWN = {
    "pages": "pages",
    "cached_tokens": "cached",
    "steps": "steps",
    "chunks": "chunks",
    "retractions": "retracted",
    "proposed_tokens": "guessed",
    "accepted_tokens": "accepted",
}
"""The counters that tell why a hop took its time; `--json` has all."""


def trace_lines(trace: Mapping[str, Any], columns: int) -> list[str]:
    """The lines of a trace as GET /trace/{id} gives it.

    Raises:
        CommandError: it is none.
    """
    try:
        return list(_lines(trace, columns))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CommandError(f"the server's trace is not understood: {type(error).__name__} {error}") from None


def _lines(trace: Mapping[str, Any], columns: int) -> Iterator[str]:
    duration_ms = float(trace["duration_ms"])
    state = "" if trace.get("has_ended", True) else ", still running"
    first = trace.get("ttft_ms")
    facts = [f"{trace['route']}", f"status {trace['status']}", f"{_ms(duration_ms)} ms{state}"]
    if first is not None:
        facts.append(f"first token after {_ms(first)} ms")
    yield f"{trace['id']}: {', '.join(facts)}"
    yield f"started {trace['started']}"
    hops = list(trace.get("hops") or ())
    for number, answer in enumerate(trace["answers"]):
        yield ""
        yield _answer(number, answer, len(trace["answers"]))
        yield from _table([*hops, *answer["hops"]] if number == 0 else answer["hops"], duration_ms, columns)
    if not trace["answers"]:
        yield ""
        yield from _table(hops, duration_ms, columns)


def _answer(number: int, answer: Mapping[str, Any], num_answers: int) -> str:
    name = f"answer {number}: " if num_answers > 1 else ""
    return (
        f"{name}prompt {answer['prompt_tokens']} tokens, {answer['cached_tokens']} of them cached; "
        f"{answer['output_tokens']} tokens out; {answer['finish'] or 'not finished'}"
    )


def _table(hops: Sequence[Mapping[str, Any]], duration_ms: float, columns: int) -> list[str]:
    rows = [("HOP", "PROCESS", "WAIT ms", "WORK ms", "COUNTERS")]
    for hop in hops:
        process = f"{hop['role']} {hop['instance']}".strip()
        counters = _counters(hop.get("counters") or {})
        rows.append((str(hop["hop"]), process, _ms(hop["wait_ms"]), _ms(hop["work_ms"]), counters))
    width = max(len(row[-1]) for row in rows)
    lines = aligned([(*row[:-1], row[-1].ljust(width), "") for row in rows], right=(2, 3))
    lines = [line.ljust(max(map(len, lines))) for line in lines]
    room = min(_MOST_BAR, columns - len(lines[0]) - 4)
    if room < _LEAST_BAR:
        return [line.rstrip() for line in lines]
    bars = ["", *(f"|{bar(hop, duration_ms, room)}|" for hop in hops)]
    return [f"{line}  {drawn}".rstrip() for line, drawn in zip(lines, bars, strict=True)]


def _counters(counters: Mapping[str, float]) -> str:
    """Those that are shown, and that counted anything."""
    return ", ".join(f"{name} {counters[key]:.0f}" for key, name in _SHOWN.items() if counters.get(key))


def bar(hop: Mapping[str, Any], duration_ms: float, width: int) -> str:
    """When a hop waited and worked, in `width` columns that stand for the whole request.

    What took any time at all is at least one mark long.
    """
    start, wait, work = float(hop["start_ms"]), float(hop["wait_ms"]), float(hop["work_ms"])
    scale = width / max(duration_ms, start + wait + work, 1e-9)
    begin = min(width - 1, max(0, int(start * scale)))
    marks = _WAIT * _length(wait, scale) + _WORK * _length(work, scale)
    return (" " * min(begin, max(0, width - len(marks))) + marks)[:width].ljust(width)


def _length(time_ms: float, scale: float) -> int:
    return max(1, round(time_ms * scale)) if time_ms > 0 else 0


def _ms(value: float) -> str:
    return f"{value:.1f}"
