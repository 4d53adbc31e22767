"""What is wrong with a document that a user wrote: errors that name the field and say what to do.

A `UserError` is never retried: only a change of the document can cure it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FieldError:
    """One thing that is wrong: where, what, and how to put it right.

    `path` is written as in Kubernetes messages (`spec.prefill.gpus`, `spec.engine.args[2]`); it is empty when the
    document as a whole is wrong.
    """

    path: str
    message: str
    remedy: str

    def __str__(self) -> str:
        where = f"{self.path}: " if self.path else ""
        return f"{where}{self.message}. {self.remedy}" if self.remedy else f"{where}{self.message}"


class UserError(Exception):
    """The user's document cannot be used as it is; `errors` holds every finding, ordered by path."""

    exit_code = 2

    def __init__(self, errors: Sequence[FieldError], *, subject: str = "") -> None:
        self.errors = tuple(sorted(errors, key=lambda error: error.path))
        self.subject = subject
        super().__init__(self._text())

    def _text(self) -> str:
        count = len(self.errors)
        head = f"{self.subject or 'the document'} has {count} error{'' if count == 1 else 's'}"
        return "\n".join([f"{head}:", *(f"  {error}" for error in self.errors)])
