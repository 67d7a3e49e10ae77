"""What people are told of a record: its status, the columns of a list, the events.

The first five fields of a status are the original controller's, with its meaning but for two things: a
search for addresses that fails does not make the published ones wrong, and a record that is switched off has
no result. The columns are the original's, too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, NamedTuple, TypeAlias

from pydantic import ConfigDict, Field

from dnsproxy import times
from dnsproxy.dyndns.documents import CamelModel
from dnsproxy.dyndns.outcomes import Code, Found, Known, Unavailable
from dnsproxy.dyndns.plan import RULES, Kind, Phase

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dnsproxy.dyndns.documents import Domain
    from dnsproxy.dyndns.plan import Clock, Hold, State

SOURCE: Final = "contrib.strato.com/strato-dyndns-ctrl"  # of the original's events


class Column(NamedTuple):
    """A column of a list: its title, where it is in the object, its type in a CRD."""

    title: str
    path: tuple[str, str]
    type: str


COLUMNS: Final = (
    Column("Fqdn", ("spec", "fqdn"), "string"),
    Column("IP Address", ("status", "ipAddress"), "string"),
    Column("Mode", ("status", "mode"), "string"),
    Column("Successful", ("status", "lastResult"), "boolean"),
    Column("Last Run", ("status", "lastLoop"), "string"),
    Column("Enabled", ("spec", "enabled"), "boolean"),
)
WIDE: Final = (
    *COLUMNS,
    Column("IPv6", ("status", "ipv6"), "string"),
    Column("Phase", ("status", "phase"), "string"),
    Column("Last Change", ("status", "lastChange"), "string"),
    Column("Next Run", ("status", "nextRun"), "string"),
    Column("Message", ("status", "message"), "string"),
)


Time: TypeAlias = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


class DomainStatus(CamelModel):
    """The status of a Domain. Times are RFC 3339 in UTC."""

    model_config = ConfigDict(populate_by_name=True)

    enabled: bool | None = None
    ip_address: str | None = Field(None, description="The first address that was accepted.")
    mode: Literal["Manual", "Dynamic"] | None = None
    last_loop: Time | None = Field(None, description="When the record was looked at.")
    last_result: bool | None = Field(None, description="Whether the record is as it shall be.")
    phase: str | None = Field(None, description="pending, in-sync, held, halted and so on.")
    ipv4: str | None = Field(None, description="The IPv4 address that was accepted.")
    ipv6: str | None = Field(None, description="The IPv6 address that was accepted.")
    last_attempt: Time | None = Field(None, description="When a request was made.")
    last_success: Time | None = Field(None, description="When a request was accepted.")
    last_change: Time | None = Field(None, description="When other addresses were accepted.")
    last_code: str | None = Field(None, description="The word of the last answer, or what came instead.")
    message: str | None = Field(None, description="What is the matter, and what to do about it.")
    next_run: Time | None = Field(None, description="When the record is looked at again.")
    held_until: Time | None = Field(None, description="Until when nothing is sent.")
    held_reason: str | None = Field(None, description="Why nothing is sent.")
    consecutive_failures: int = 0
    observed_generation: int | None = None
    sources: list[str] = Field([], description="Who told the addresses.")
    cgnat: bool = Field(False, description="Whether IPv4 ends at the carrier, so that nobody gets in.")


class Event(NamedTuple):
    """Something that has changed; `at` is seconds since 1970, `object` as in `Domain default/www`."""

    at: float
    type: Literal["Normal", "Warning"]
    reason: str
    object: str
    fqdn: str
    message: str

    def row(self) -> dict[str, Any]:
        """Return the event for people and files."""
        return self._asdict() | {"at": times.to_text(self.at), "source": SOURCE}


@dataclass(frozen=True, slots=True)
class View:
    """What is known of a record at the moment; times are monotonic."""

    domain: Domain
    state: State
    phase: Phase = Phase.PENDING
    last_loop: float | None = None
    next_run: float | None = None
    found: Found | None = None
    problem: str = ""


def status(view: View, clock: Clock) -> DomainStatus:
    """Return a record's status as of `clock`."""
    domain, state = view.domain, view.state
    held = {len(packed): text for packed, text in _accepted(state)}
    hold = _hold(state, clock.now)
    return DomainStatus(
        enabled=domain.enabled,
        ip_address=held.get(4) or held.get(16),
        mode=domain.mode,
        last_loop=_time(view.last_loop, clock),
        last_result=_result(view),
        phase=view.phase.value,
        ipv4=held.get(4),
        ipv6=held.get(16),
        last_attempt=_time(state.attempt_at, clock),
        last_success=_time(state.accepted_at, clock),
        last_change=_time(state.changed_at, clock),
        last_code=state.code.value if state.code else None,
        message=_message(view) or None,
        next_run=_time(view.next_run, clock),
        held_until=_time(hold.until, clock) if hold else None,
        held_reason=hold.code.value if hold else None,
        consecutive_failures=state.failures,
        observed_generation=domain.generation,
        sources=_sources(view.found),
        cgnat=view.found is not None and view.found.cgnat,
    )


def document(domain: Domain, shown: DomainStatus) -> dict[str, Any]:
    """Return a record as an object with its status, for JSON and YAML. It holds no password."""
    return {
        "apiVersion": "dyndns.contrib.strato.com/v1alpha1",
        "kind": "Domain",
        "metadata": {"name": domain.name, "namespace": domain.namespace},
        "spec": {
            "fqdn": domain.fqdn,
            "enabled": domain.enabled,
            "interval": int(domain.interval // 60),
            "username": domain.username,
            "endpoint": domain.endpoint,
        },
        "status": shown.model_dump(by_alias=True),
    }


def cells(shown: Mapping[str, Any], columns: tuple[Column, ...] = COLUMNS) -> list[str]:
    """Return what a list shows of a `document`, a column each."""
    return [_cell(shown[section].get(key)) for _, (section, key), _ in columns]


def _cell(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "" if value is None else str(value)


def advice(code: Code, text: str) -> str:
    """Return what was answered and what it means, as a sentence."""
    said = text or code.value
    return f"{said}: {RULES[code].advice}" if RULES[code].advice else said


def _accepted(state: State) -> list[tuple[bytes, str]]:
    accepted = state.accepted
    return [] if accepted is None else list(zip(accepted.packed, accepted.addresses, strict=True))


def _hold(state: State, now: float) -> Hold | None:
    hold = state.hold
    return None if hold is None or (hold.until is not None and hold.until <= now) else hold


def _result(view: View) -> bool | None:
    if view.phase is Phase.DISABLED or view.last_loop is None:
        return None
    return view.phase is Phase.IN_SYNC and not view.problem


def _message(view: View) -> str:
    if view.problem:
        return view.problem
    code = view.state.code
    if code is None or RULES[code].kind is Kind.SUCCESS:
        return ""
    return advice(code, view.state.text)


def _sources(found: Found | None) -> list[str]:
    both = (found.ipv4, found.ipv6) if found else ()
    return [source for each in both if isinstance(each, Known) for source in each.sources]


def trouble(found: Found) -> Unavailable | None:
    """Return what keeps a search from being whole."""
    return next((each for each in (found.ipv4, found.ipv6) if isinstance(each, Unavailable)), None)


def _time(at: float | None, clock: Clock) -> str | None:
    if at is None:
        return None
    return times.to_text(min(max(clock.wall - clock.now + at, 0.0), _LAST))


_LAST: Final = 253_402_300_799.0  # the end of the year 9999, which is the last that can be written
