"""When one record may be updated, and what an answer means for the time after it.

The only question that an update has to answer is: does the provider hold what we want it to hold? What it
holds is what it last *accepted*; nothing else is believed, least of all a DNS lookup. A request is made if
the wanted target differs from the accepted one, and then only if nothing forbids it:

    spacing   300 s between two requests for a host, whatever happens between them, restarts included
    a halt    a fatal word: nothing is sent until the document or the password has changed, or somebody
              says resume; an address that changes is no reason
    a hold    a word for a time: from `first` to `longest` seconds, doubled at each repetition

*Doubt.* After a time-out, a broken connection or a crash nobody knows what the provider holds: it may have
acted. Then the wanted target is sent even if it equals the accepted one (the address may have gone there and
back), but not sooner than after any other failure. `begin` is stored before the request is sent, so that a
process that dies with the request in flight wakes up in doubt and not in ignorance.

*Time* is monotonic in here. A row on disk keeps its times as they are, and beside them both clocks and the
boot they belong to; in the same boot they are good as they stand, whatever happened to the wall clock, and
otherwise they are moved by the difference of the clocks. A time that then lies in the future is cut to now,
which makes waiting longer and never shorter.

States are values: each function returns the next one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from dnsproxy.addresses import from_text, to_text
from dnsproxy.dyndns.outcomes import (
    Code,
    Finding,
    Found,
    Known,
    NotManaged,
    Password,
    Reply,
    Request,
    Unavailable,
    Why,
    printable,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

SPACING: Final = 300.0  # seconds between two requests for one host
FORCE_SPACING: Final = 3600.0  # seconds between two forced ones: a button is pressed in a loop, too
DAY: Final = 86_400.0
RETRY: Final = 30.0  # seconds until addresses are looked for again, doubled up to the interval
NOCHG_MOST: Final = 3  # within a day; a host whose client goes on is blocked
JITTER: Final = 0.1  # share by which a check comes earlier, so that many hosts do not march in step
HORIZON: Final = 7 * DAY  # how long the row of a host that is in no document is kept


class Kind(Enum):
    """The classes of outcomes."""

    SUCCESS = "success"
    FATAL = "fatal"  # halted until something changes
    BLOCKED = "blocked"  # too many updates
    SERVER = "server"  # trouble on the other side, which said so
    UNKNOWN = "unknown"  # nothing that could be understood


class Rule(NamedTuple):
    """What an outcome demands: seconds of the first hold and of the longest.

    `certain`: it is sure that the provider did not act. `advice` is for people.
    """

    kind: Kind
    first: float = 0.0
    longest: float = 0.0
    certain: bool = True
    advice: str = ""


_SERVER: Final = Rule(Kind.SERVER, 1800.0, 21_600.0, certain=False, advice="the provider has trouble")
_UNKNOWN: Final = Rule(Kind.UNKNOWN, 60.0, 1800.0, certain=False)

RULES: Final[dict[Code, Rule]] = {
    Code.GOOD: Rule(Kind.SUCCESS),
    Code.NOCHG: Rule(Kind.SUCCESS),
    Code.BADAUTH: Rule(
        Kind.FATAL, advice="user name or password is wrong: mend username or the password of this record"
    ),
    Code.DONATOR: Rule(Kind.FATAL, advice="the contract does not include what was asked for"),
    Code.YOURS: Rule(Kind.FATAL, advice="the host name belongs to another account"),
    Code.ACTIVE: Rule(Kind.FATAL, advice="the host name is not active: enable it in the provider's login"),
    Code.NOTFQDN: Rule(
        Kind.FATAL,
        advice="the host name is not right, or DynDNS is not enabled for it in the provider's login",
    ),
    Code.NOHOST: Rule(Kind.FATAL, advice="the host name is not in this account: see fqdn and username"),
    Code.NUMHOST: Rule(Kind.FATAL, advice="too many host names, or one that has several addresses"),
    Code.BADSYS: Rule(Kind.FATAL, advice="the provider could not read the request: see endpoint"),
    Code.BADAGENT: Rule(Kind.FATAL, advice="the provider does not accept this program or its request"),
    Code.NO_SERVICE: Rule(Kind.FATAL, advice="there is no such service at this address: see endpoint"),
    Code.ABUSE: Rule(Kind.BLOCKED, 3600.0, DAY, advice="the provider has blocked the host: too many updates"),
    Code.DNSERR: _SERVER,
    Code.NINE_ONE_ONE: _SERVER,
    Code.SERVER_ERROR: _SERVER,
    Code.TOO_MANY: _SERVER._replace(certain=True, advice="the provider wants fewer requests"),
    Code.REDIRECT: _SERVER._replace(
        certain=True, advice="the service is elsewhere, and redirects are not followed: see endpoint"
    ),
    Code.UNKNOWN: _UNKNOWN._replace(advice="the answer was not one of the protocol: see endpoint"),
    Code.TIMEOUT: _UNKNOWN._replace(advice="no answer in time; the update may have been made all the same"),
    Code.NETWORK: _UNKNOWN._replace(advice="the provider could not be reached: see this host's network"),
    Code.TLS: _UNKNOWN._replace(
        certain=True, advice="no certificate to be trusted, so nothing was sent: see clock and CA store"
    ),
}


@dataclass(frozen=True, slots=True)
class Target:
    """What a provider holds, or shall hold, for a host: addresses as text, IPv4 first."""

    endpoint: str
    hostname: str
    username: str
    addresses: tuple[str, ...]

    @property
    def packed(self) -> tuple[bytes, ...]:
        """The addresses as octets."""
        return tuple(map(from_text, self.addresses))

    def request(self, password: Password) -> Request:
        """Return the request that asks for this."""
        return Request(self.endpoint, self.hostname, self.username, password, self.packed)


@dataclass(frozen=True, slots=True)
class Hold:
    """Why nothing is sent. `until` None: until what `fingerprint` stands for has changed, or a resume."""

    code: Code
    since: float
    until: float | None
    fingerprint: str


@dataclass(frozen=True, slots=True)
class State:
    """What is known of one host; all that has to survive a restart.

    `pending`: a request is under way; `doubtful`: nobody knows what came of one. `failures` are all since
    the last success, `strikes` those of the last one's kind. `told` has, by topic, what the last event said.
    """

    accepted: Target | None = None
    accepted_at: float | None = None
    changed_at: float | None = None
    attempt_at: float | None = None
    pending: bool = False
    doubtful: bool = False
    code: Code | None = None
    text: str = ""
    hold: Hold | None = None
    failures: int = 0
    strikes: int = 0
    nochg: tuple[float, ...] = ()
    force: bool = False
    forced_at: float | None = None
    told: Mapping[str, str] = field(default_factory=dict)


class Phase(Enum):
    """Where a record stands, for people."""

    PENDING = "pending"
    IN_SYNC = "in-sync"
    SPACED = "spaced"
    RETRYING = "retrying"
    HELD = "held"
    HALTED = "halted"
    NO_SECRET = "waiting-for-secret"
    NO_ADDRESS = "waiting-for-address"
    DISABLED = "disabled"


class Rest(NamedTuple):
    """Nothing to be sent: until a time, or (None) for as long as nothing changes."""

    phase: Phase
    until: float | None = None


class Publish(NamedTuple):
    """What is to be sent, now."""

    target: Target


Decision: TypeAlias = Rest | Publish


# --- before a request


def addresses(found: Found, accepted: Target | None) -> tuple[str, ...]:
    """Return the whole set to publish, empty if nothing is known.

    A managed family that could not be found keeps the address that was accepted last: to leave it out would
    delete its record. Where none was accepted yet, the other family waits with it, unless there is none that
    could be published.
    """
    kept = {len(packed): text for packed, text in _held(accepted)}
    if any(_is_missing(finding, kept.get(size)) for size, finding in ((4, found.ipv4), (16, found.ipv6))):
        return ()
    both = (_address(found.ipv4, kept.get(4)), _address(found.ipv6, kept.get(16)))
    anything = isinstance(found.ipv4, Known) or isinstance(found.ipv6, Known)
    return tuple(text for text in both if text is not None) if anything else ()


def _is_missing(finding: Finding, kept: str | None) -> bool:
    return isinstance(finding, Unavailable) and finding.why is not Why.REJECTED and kept is None


def _held(accepted: Target | None) -> list[tuple[bytes, str]]:
    return [] if accepted is None else list(zip(accepted.packed, accepted.addresses, strict=True))


def _address(finding: Finding, kept: str | None) -> str | None:
    if isinstance(finding, Known):
        return to_text(finding.address)
    return None if isinstance(finding, NotManaged) else kept


def lifted(state: State, fingerprint: str) -> State:
    """Return the state without a halt whose cause has changed; the same object where there is none."""
    hold = state.hold
    if hold is None or hold.until is not None or hold.fingerprint == fingerprint:
        return state
    return resumed(state)


def resumed(state: State) -> State:
    """Return the state without its hold, ready to try (after the spacing)."""
    return replace(state, hold=None, strikes=0) if state.hold else state


def forced(state: State, now: float) -> State | str:
    """Return the state in which a request is due though nothing differs, or why there may be none."""
    if state.hold is not None and not _is_over(state.hold, now):
        return f"held after {state.hold.code.value}: resume it first, once the cause is mended"
    if state.forced_at is not None and (left := state.forced_at + FORCE_SPACING - now) > 0:
        return f"forced less than an hour ago: possible again in {left / 60:.0f} minutes"
    return replace(state, force=True, forced_at=now)


def decide(state: State, target: Target, now: float, refresh: float | None = None) -> Decision:
    """Return what to do about a target. `refresh`: seconds after which it is sent though nothing differs."""
    if not _is_due(state, target, now, refresh):
        return Rest(Phase.IN_SYNC)
    hold = state.hold
    if hold is not None and not _is_over(hold, now):
        return Rest(Phase.HALTED if hold.until is None else _waiting(hold), hold.until)
    if state.attempt_at is not None and now < state.attempt_at + SPACING:
        return Rest(Phase.SPACED, state.attempt_at + SPACING)
    return Publish(target)


def _is_due(state: State, target: Target, now: float, refresh: float | None) -> bool:
    if state.force or target != state.accepted:
        return True
    if len(_recent(state.nochg, now)) >= NOCHG_MOST:
        return False  # the provider has said often enough that it holds this
    stale = refresh is not None and state.accepted_at is not None and now >= state.accepted_at + refresh
    return state.doubtful or state.pending or stale


def _is_over(hold: Hold, now: float) -> bool:
    return hold.until is not None and now >= hold.until


def _waiting(hold: Hold) -> Phase:
    return Phase.RETRYING if RULES[hold.code].kind is Kind.UNKNOWN else Phase.HELD


def _recent(times: tuple[float, ...], now: float) -> tuple[float, ...]:
    return tuple(time for time in times if now - time < DAY)


# --- a request


def begin(state: State, now: float) -> State:
    """Return the state to be stored before a request is sent."""
    return replace(state, attempt_at=now, pending=True, force=False)


def settle(
    state: State, target: Target, reply: Reply, now: float, fingerprint: str, *, stop_on_abuse: bool = False
) -> State:
    """Return the state after a reply to a request for `target`."""
    rule = RULES[reply.code]
    state = replace(state, pending=False, text=printable(reply.text))
    if rule.kind is Kind.SUCCESS:
        return _accepted(state, target, reply, now)
    again = state.failures and state.code is not None and RULES[state.code].kind is rule.kind
    strikes = state.strikes + 1 if again else 1
    halts = rule.kind is Kind.FATAL or (stop_on_abuse and rule.kind is Kind.BLOCKED)
    until = None if halts else now + _pause(rule, strikes, reply)
    return replace(
        state,
        code=reply.code,
        doubtful=state.doubtful or not rule.certain,
        hold=Hold(reply.code, now, until, fingerprint),
        failures=state.failures + 1,
        strikes=strikes,
    )


def _accepted(state: State, target: Target, reply: Reply, now: float) -> State:
    changed = state.accepted is None or state.accepted.addresses != target.addresses
    nochg = _recent(state.nochg, now)
    return replace(
        state,
        accepted=target,
        accepted_at=now,
        changed_at=now if changed else state.changed_at,
        doubtful=False,
        code=reply.code,
        hold=None,
        failures=0,
        strikes=0,
        nochg=(*nochg, now)[-NOCHG_MOST:] if reply.code is Code.NOCHG else nochg,
    )


def _pause(rule: Rule, strikes: int, reply: Reply) -> float:
    """Return for how many seconds nothing is sent, which is never less than the spacing.

    What a server asks for counts instead of ours where HTTP alone speaks, and on top where a word does.
    """
    asked = min(reply.retry_after or 0.0, DAY)
    if asked > 0 and reply.code in (Code.TOO_MANY, Code.SERVER_ERROR):
        return max(asked, SPACING)
    return max(min(rule.first * 2.0 ** min(strikes - 1, 32), rule.longest), asked, SPACING)


# --- between two requests


def next_check(rest: Rest, interval: float, now: float, spread: float) -> float:
    """Return when to look again: after the interval, or when a hold is over. `spread` is from 0 to 1."""
    usual = now + interval * (1 - JITTER * spread)
    return usual if rest.until is None else min(usual, max(rest.until, now))


def retry_check(tries: int, interval: float, now: float) -> float:
    """Return when to look again after so many searches that found nothing."""
    return now + min(RETRY * 2.0 ** min(tries - 1, 16), interval)


# --- rows


class Clock(NamedTuple):
    """Both clocks at one moment, and the boot to which the first belongs (empty: not known)."""

    now: float
    wall: float
    boot: str


def to_row(state: State, clock: Clock) -> bytes:
    """Return a state as JSON. It holds no password."""
    row = asdict(state) | {"code": state.code.value if state.code else None, "clock": list(clock)}
    if state.hold is not None:
        row["hold"]["code"] = state.hold.code.value
    return json.dumps(row).encode()


def from_row(row: bytes | None, clock: Clock) -> State:
    """Return the state that a row holds, its times as of this clock.

    A row that cannot be read may stand for a request made just now; none means that there was none.
    """
    if row is None:
        return State()
    try:
        return _restored(json.loads(row), clock)
    except (ValueError, TypeError, KeyError, AttributeError):
        return State(attempt_at=clock.now)


def _restored(row: dict[str, Any], clock: Clock) -> State:
    written = Clock(*row.pop("clock"))
    same = bool(clock.boot) and clock.boot == written.boot
    shift = 0.0 if same else (clock.now - clock.wall) - (written.now - written.wall)

    def moved(time: float) -> float:
        return min(float(time) + shift, clock.now)

    for key in ("accepted_at", "changed_at", "attempt_at", "forced_at"):
        row[key] = None if row[key] is None else moved(row[key])
    row["nochg"] = tuple(map(moved, row["nochg"]))
    row["code"] = Code(row["code"]) if row["code"] else None
    row["accepted"] = _target(row["accepted"]) if row["accepted"] else None
    row["hold"] = _hold(row["hold"], moved(row["hold"]["since"])) if row["hold"] else None
    state = State(**row)
    if not state.pending:
        return state
    return replace(state, pending=False, doubtful=True, attempt_at=clock.now)  # sent at some time until now


def _target(row: dict[str, Any]) -> Target:
    texts = tuple(to_text(from_text(text)) for text in row["addresses"])
    return Target(**row | {"addresses": texts})


def _hold(row: dict[str, Any], since: float) -> Hold:
    until = None if row["until"] is None else since + (float(row["until"]) - float(row["since"]))
    return Hold(Code(row["code"]), since, until, str(row["fingerprint"]))


def is_outdated(state: State, now: float) -> bool:
    """Tell whether the row of a host that no document names need not be kept."""
    return state.attempt_at is None or now - state.attempt_at > HORIZON
