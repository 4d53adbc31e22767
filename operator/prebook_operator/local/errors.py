"""Errors of the local runner. Each is something to tell the user: what happened, and what to do about it."""

from __future__ import annotations


class LocalError(Exception):
    """Base of every failure that ends a command with a message instead of a traceback."""

    exit_code = 1

    def __init__(self, message: str, *, remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.message}\n  → {self.remedy}" if self.remedy else self.message


class UserError(LocalError):
    """The input (file, option, value) cannot work; trying again changes nothing."""

    exit_code = 2


class MachineError(LocalError):
    """This machine lacks something: a port, memory, a GPU, a kernel feature."""

    exit_code = 3


class StartError(LocalError):
    """A pod could not be brought up: it crash-looped or ended before it was ever ready."""

    exit_code = 4


class AskError(LocalError):
    """The question could not be asked, or the answer did not come."""

    exit_code = 5
