"""The loop of a chat: reads an input, asks or does what it says, until the person leaves."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Protocol

from services.launcher.chat.answer import Answer
from services.launcher.chat.answer_view import AnswerView
from services.launcher.chat.conversation import Conversation, Turn
from services.launcher.chat.inputs import COMMANDS, Command, Message, parse_input
from services.launcher.errors import CommandError
from services.launcher.http.client import Client
from services.launcher.terminal import Style, Terminal, aligned, harmless

_ROUTE = "/v1/chat/completions"
_NOTHING = "none"


class Inputs(Protocol):
    """Where inputs come from."""

    def read(self) -> str:
        """The next one; EOFError at the end, KeyboardInterrupt when the person gives it up."""


class ChatSession:
    """One conversation with one server."""

    def __init__(self, client: Client, conversation: Conversation, terminal: Terminal) -> None:
        self._client = client
        self._conversation = conversation
        self._terminal = terminal
        self._last: Answer | None = None
        self._shows_statistics = False
        self._unanswered: str | None = None  # the last question, if nothing came of it and it was taken back
        self._actions: dict[str, Callable[[str], None]] = {
            "system": self._system, "set": self._set, "model": self._model, "stats": self._statistics,
            "retry": self._retry, "undo": self._undo, "clear": self._clear, "save": self._save, "help": self._help,
        }  # fmt: skip

    def run(self, inputs: Inputs) -> None:
        """Talks until the inputs end or the person says so."""
        while True:
            try:
                entered = parse_input(inputs.read())
                if entered == Command("quit", ""):
                    return
                if isinstance(entered, Message):
                    self.ask(entered.text)
                elif entered is not None:
                    self._actions[entered.name](entered.argument)
            except EOFError:
                self._terminal.line()
                return
            except KeyboardInterrupt:
                self._terminal.line()
                self._note("Ctrl-D leaves")
            except (CommandError, OSError) as error:
                self._terminal.line(self._terminal.styled(f"tokenway: {harmless(str(error))}", Style.RED))

    def ask(self, question: str) -> bool:
        """Asks and shows the answer; Ctrl-C gives it up, and what has come stays. False when it was given up.

        Raises:
            CommandError: refused or broken off. A question without any answer is taken back.
        """
        turn = Turn(question)
        self._conversation.turns.append(turn)
        answer = self._last = Answer(time.monotonic())
        view = AnswerView(self._terminal)
        is_whole = True
        try:
            view.wait()
            with closing(self._client.stream(_ROUTE, self._conversation.body())) as events:
                for data in events:
                    piece = answer.take(data, time.monotonic())
                    if piece is not None:
                        view.show(piece)
        except KeyboardInterrupt:
            is_whole = False
        finally:
            view.end()
            turn.answer = answer.text
            self._unanswered = None if answer.text else question
            if not answer.text:
                self._conversation.turns.remove(turn)
        if not is_whole:
            self._note("given up")
        elif self._shows_statistics:
            self._show_statistics()
        return is_whole

    def _system(self, argument: str) -> None:
        if argument:
            self._conversation.system = "" if argument == _NOTHING else argument
        self._note(f"system message: {self._conversation.system or _NOTHING}")

    def _set(self, argument: str) -> None:
        if argument:
            self._conversation.set_field(argument)
        fields = ", ".join(f"{name} {value}" for name, value in self._conversation.fields.items())
        self._note(fields or "every field has the server's own value")

    def _model(self, argument: str) -> None:
        names = self._client.models()
        if argument:
            if argument not in names:
                raise CommandError(f"the server has no model {argument!r}; it has {', '.join(names) or 'none'}")
            self._conversation.model = argument
        for name in names:
            self._terminal.line(("* " if name == self._conversation.model else "  ") + harmless(name))

    def _statistics(self, argument: str) -> None:
        if argument in ("on", "off"):
            self._shows_statistics = argument == "on"
        elif argument:
            raise CommandError("/stats, /stats on or /stats off")
        self._show_statistics()

    def _show_statistics(self) -> None:
        for line in self._last.statistics() if self._last is not None else ["nothing was asked yet"]:
            self._note(line)

    def _retry(self, argument: str) -> None:
        unanswered = self._unanswered
        if unanswered is not None:
            self.ask(unanswered)
            return
        if not self._conversation.turns:
            raise CommandError("there is no question to ask again")
        last = self._conversation.turns.pop()
        try:
            self.ask(last.question)
        except CommandError:
            if self._unanswered is not None:
                self._conversation.turns.append(last)  # the earlier answer is better than none
                self._unanswered = None
            raise

    def _undo(self, argument: str) -> None:
        self._unanswered = None
        if not self._conversation.turns:
            raise CommandError("there is nothing to take back")
        self._note(f"taken back: {self._conversation.turns.pop().question}")

    def _clear(self, argument: str) -> None:
        self._conversation.turns.clear()
        self._unanswered = None
        self._note("the conversation is forgotten")

    def _save(self, argument: str) -> None:
        if not argument:
            raise CommandError("/save needs the name of a file")
        path = Path(argument).expanduser()
        path.write_text(self._conversation.export(), encoding="utf-8")
        self._note(f"written to {path}")

    def _help(self, argument: str) -> None:
        rows = [(f"/{name} {what}".rstrip(), text) for name, (what, text) in COMMANDS.items()]
        for line in aligned([*rows, ('"""', "begins and ends a message of several lines; so does \\ at a line's end"),
                             ("Ctrl-C", "gives an answer up; Ctrl-D leaves")]):  # fmt: skip
            self._terminal.line(line)

    def _note(self, text: str) -> None:
        self._terminal.line(self._terminal.styled(harmless(text), Style.DIM))
