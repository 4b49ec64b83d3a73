"""gpu_worker: the grammar child seen from the worker: started when first needed, asked, killed when it overruns.

Owns the child process. Everything here may block: only the grammar compiler's thread calls it, never the work loop.
"""

from __future__ import annotations

import logging
import os
import selectors
import subprocess
import sys
import time
from dataclasses import dataclass

from services.gpu_worker.grammar_child import LENGTH_BYTES, READY
from services.runtime.config import inherited_environment
from services.wire.codec import decode, encode
from services.wire.steps import CompileGrammar, GrammarCompiled

_START_TIMEOUT_S = 60.0  # the vocabulary is read and sorted: a second, more on a loaded machine

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What the child is started with: the model's path, the width of its logits, and its limits."""

    model: str
    width: int
    timeout_s: float
    memory_mib: int

    @property
    def command(self) -> list[str]:
        """Its command line."""
        arguments = (self.model, self.width, self.timeout_s, self.memory_mib)
        return [sys.executable, "-m", "services.gpu_worker.grammar_child", *map(str, arguments)]


class GrammarChildError(Exception):
    """The child does not start: the grammar is not to blame."""


class _OverrunError(Exception):
    """The child did not answer in time."""


class GrammarProcess:
    """A child that is there when it is needed."""

    def __init__(self, spec: ChildSpec) -> None:
        self._spec = spec
        self._child: subprocess.Popen[bytes] | None = None
        self.num_killed = 0
        """Children that overran or died over a grammar."""

    @property
    def pid(self) -> int | None:
        """Of the child that runs now."""
        return None if self._child is None else self._child.pid

    def problem_of(self, request: CompileGrammar) -> str:
        """Why a grammar cannot be used; "" when it can.

        Raises:
            GrammarChildError: no child can be started.
        """
        child = self._running()
        frame = encode(request)
        try:
            self._write(child, len(frame).to_bytes(LENGTH_BYTES, "big") + frame)
            deadline_s = time.monotonic() + self._spec.timeout_s
            header = self._read(child, LENGTH_BYTES, deadline_s)
            answer = decode(self._read(child, int.from_bytes(header, "big"), deadline_s))
        except _OverrunError:
            self._end()
            return f"compiling it takes more than {self._spec.timeout_s:g} s"
        except (EOFError, BrokenPipeError):
            self._end()
            return f"compiling it takes more than {self._spec.memory_mib} MiB, or breaks the grammar library"
        if not isinstance(answer, GrammarCompiled):
            raise TypeError(f"the grammar child answers with a {type(answer).__name__}")
        return answer.problem

    def close(self) -> None:
        """Ends the child."""
        if self._child is not None:
            self._stop(self._child)
            self._child = None

    def _running(self) -> subprocess.Popen[bytes]:
        """The child; a new one if there is none or it has ended by itself."""
        if self._child is not None and self._child.poll() is not None:
            self.close()
        if self._child is None:
            self._child = self._start()
        return self._child

    def _start(self) -> subprocess.Popen[bytes]:
        started_s = time.monotonic()
        child = subprocess.Popen(
            self._spec.command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=inherited_environment(), bufsize=0
        )
        try:
            greeting = self._read(child, len(READY), started_s + _START_TIMEOUT_S)
        except (_OverrunError, EOFError) as error:
            self._stop(child)
            raise GrammarChildError(f"the grammar child does not start (status {child.returncode})") from error
        if greeting != READY:
            self._stop(child)
            raise GrammarChildError(f"the grammar child says {greeting!r}")
        logger.info("grammar child %d is ready after %.1f s", child.pid, time.monotonic() - started_s)
        return child

    def _end(self) -> None:
        """Kills the child over a grammar; the next request starts another."""
        self.num_killed += 1
        logger.warning("grammar child %s is ended over a grammar", self.pid)
        self.close()

    @staticmethod
    def _stop(child: subprocess.Popen[bytes]) -> None:
        child.kill()
        for stream in (child.stdin, child.stdout):
            if stream is not None:
                stream.close()
        child.wait()

    @staticmethod
    def _write(child: subprocess.Popen[bytes], data: bytes) -> None:
        assert child.stdin is not None
        view = memoryview(data)
        while view:
            view = view[child.stdin.write(view) or 0 :]

    @staticmethod
    def _read(child: subprocess.Popen[bytes], num_bytes: int, deadline_s: float) -> bytes:
        assert child.stdout is not None
        data = b""
        with selectors.DefaultSelector() as selector:
            selector.register(child.stdout, selectors.EVENT_READ)
            while len(data) < num_bytes:
                if not selector.select(max(0.0, deadline_s - time.monotonic())):
                    raise _OverrunError
                piece = os.read(child.stdout.fileno(), num_bytes - len(data))
                if not piece:
                    raise EOFError
                data += piece
        return data
