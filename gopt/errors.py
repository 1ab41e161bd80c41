"""The ways in which gopt says no. The command line turns each into an exit code (contract section 3)."""

from __future__ import annotations

from collections.abc import Callable
from signal import Signals


class GoptError(Exception):
    """Base of all refusals: a line, and hints on what to do next."""

    exit_code = 70
    code = "G700"
    """Stable name of the class of refusals: ``gopt help errors`` lists them."""

    def __init__(self, message: str, *hints: str) -> None:
        super().__init__(message)
        self.message = message
        self.hints = hints
        self._in_python = message

    def spell(self, spelled: Callable[[str], str]) -> None:
        """Say in tracebacks what Python's keywords are called; ``message`` and ``hints`` name options of commands."""
        if self._in_python is self.message:
            self._in_python = spelled(self.message)
            for hint in self.hints:
                self.add_note(f"hint: {spelled(hint)}")

    def __str__(self) -> str:
        return self._in_python


class OptionError(GoptError):
    """The request itself is wrong: an option, a pipeline, a folder that exists."""

    exit_code = 2
    code = "G200"


class KeywordError(OptionError, TypeError):
    """A keyword that a function does not have."""

    code = "G201"


class InputError(GoptError):
    """The file is missing, malformed, truncated or hostile."""

    exit_code = 3
    code = "G300"


class UnsupportedError(GoptError):
    """A valid graph that gopt recognises but does not handle; the message names the value and the cause."""

    exit_code = 4
    code = "G400"


class RunError(GoptError):
    """A run failed: a rank died, a call did not match, the target cannot be written."""

    exit_code = 5
    code = "G500"


class NoteWarning(UserWarning):
    """A warning to a user of Python; the command line prints it as a note."""


class InvariantError(GoptError):
    """A defect of gopt: an invariant of contract section 6 does not hold. Nothing is written."""

    exit_code = 70


class StoppedError(BaseException):
    """A signal asked gopt to end; the exit code is the shell's: 128 plus the number. Like KeyboardInterrupt, no
    Exception: raised at any operation, and not to be survived by code that handles errors."""

    code = "G600"

    def __init__(self, number: int, *hints: str) -> None:
        super().__init__(number, *hints)
        self.message = f"stopped by {Signals(number).name}"
        self.hints = hints
        self.exit_code = 128 + number

    def __str__(self) -> str:
        return self.message
