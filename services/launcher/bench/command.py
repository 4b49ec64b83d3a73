"""`tokenway bench`: hands over to what is measured: kernels, an engine, or (where nothing is said too) a server."""

from __future__ import annotations

from collections.abc import Sequence


def run(arguments: Sequence[str]) -> int:
    """Measures and prints; the exit status.

    Raises:
        CommandError: nothing could be measured; one line.
    """
    what = arguments[0] if arguments else ""
    if what in ("kernels", "engine"):
        from services.launcher.bench import worker_benches

        return worker_benches.run(what, arguments[1:])
    from services.launcher.bench import serve

    return serve.run(arguments[1:] if what == "serve" else arguments)
