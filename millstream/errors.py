"""What can go wrong around the one-machine stack. Each is one sentence that says what to do, and an exit code."""

from __future__ import annotations

from wire.errors import MillstreamError

FAILED = 1
"""exit code of everything without a code of its own; 2 is click's, for wrong options"""


class StackError(MillstreamError):
    """Root of the errors of the `millstream` command. `exit_code` is what the command exits with."""

    exit_code = FAILED


class PortTaken(StackError):
    """A port that the stack needs is in use."""

    exit_code = 3


class StateBroken(StackError):
    """The state directory can't be used as it is."""

    exit_code = 4


class AlreadyRunning(StackError):
    """A stack runs on this state directory."""

    exit_code = 5


class NotRunning(StackError):
    """No stack runs on this state directory, and the command needs one."""

    exit_code = 6


class StartFailed(StackError):
    """A part of the stack could not be started; everything that had been started is stopped again."""

    exit_code = 7


class Missing(StackError):
    """A program that Millstream needs isn't installed; the message holds the line that installs it."""

    exit_code = 8


class Refused(StackError):
    """The API or the database answered with an error; the message holds what it said."""

    exit_code = 9


class UnknownModel(StackError):
    """No model of this name was added."""

    exit_code = 11
