"""Errors that the user can mend."""

from __future__ import annotations


class UserError(Exception):
    """An error that the user can mend; printed as one line without traceback, exit code 2."""


class TraceError(UserError):
    """A trace that breaks a rule: where (file, line or request), which field, why, what to do."""

    def __init__(self, where: str, field: str, reason: str, remedy: str = "") -> None:
        self.where, self.field, self.reason, self.remedy = where, field, reason, remedy
        super().__init__(f"{where}: {field}: {reason}" + (f"; {remedy}" if remedy else ""))
