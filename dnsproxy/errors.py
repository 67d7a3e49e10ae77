"""The one error tree. An error says whose fault it is and, at the surface, which exit code it means.

    DnsproxyError               1   something failed while running
      FormError                     the sender of a DNS message (never reaches the command line)
      DocumentError             3   the operator's text: settings, policies, endpoints
      NetworkError              4   an address that cannot be bound
      RightsError               5   a right that the process lacks
      KernelError               6   a kernel feature that is missing
      SetError                  1   the kernel refused a change to a set; `cause` says why

Every message is one for a person: what, where, what was expected, what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class DnsproxyError(Exception):
    """The base of every error that this package raises on purpose."""

    exit_code = 1


class FormError(DnsproxyError):
    """Bytes that are not a DNS message we can read (RFC 1035 section 4); answered FORMERR."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One fault in a text that a user wrote.

    `line` and `column` count from 1 (0: the file as a whole); `path` is the place inside the
    document, such as `spec.allow[2].ports[0]`.
    """

    file: str
    line: int
    column: int
    path: str
    message: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return f"{where}: {self.path}: {self.message}" if self.path else f"{where}: {self.message}"


class DocumentError(DnsproxyError):
    """Texts that do not check. Nothing of the set they belong to is applied."""

    exit_code = 3

    def __init__(self, problems: list[Problem]) -> None:
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


class NetworkError(DnsproxyError):
    """An address that cannot be bound."""

    exit_code = 4


class RightsError(DnsproxyError):
    """A right that the process lacks, such as CAP_NET_ADMIN."""

    exit_code = 5


class KernelError(DnsproxyError):
    """A kernel feature that is missing, such as nf_tables."""

    exit_code = 6


class Cause(Enum):
    """Why the kernel refused a change to a set."""

    TABLE_MISSING = "table missing"
    SET_MISSING = "set missing"
    MISMATCH = "set of another type"
    FULL = "set full"
    OTHER = "refused"


class SetError(DnsproxyError):
    """The kernel refused a change to a set; nothing of that transaction was applied."""

    def __init__(self, cause: Cause, message: str) -> None:
        super().__init__(message)
        self.cause = cause
