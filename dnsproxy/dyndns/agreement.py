"""What the answers of several sources amount to: one address, or none this time and why.

A source may be wrong, be down, or answer for somebody else: an echo service behind a cache, a router that
answers DNS itself, a carrier between us and the world. Hence, for each family:

    a change    counts when as many sources as the quorum say it; so many are asked at once, and further ones
                where they failed or disagree
    no change   needs one answer that nobody contradicts
    behind      who failed, or said another address than the one agreed on, is asked last for a while
    witnesses   routers and interfaces are near and know the line itself. They are asked first, whatever they
                did before: only they can tell that a carrier's NAT lies between (100.64.0.0/10, RFC 6598).
                Then there is no IPv4 address to publish, however many services outside see the same one

Answers are compared as they would be published, that is with the suffix put in: a service outside sees a
temporary address, an interface has the stable one, and both have the same prefix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from dnsproxy.addresses import inside, is_public, to_text
from dnsproxy.dyndns.outcomes import Finding, Known, NotManaged, Unavailable, Wanted, Why

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dnsproxy.addresses import Network

BEHIND: Final = 1800.0  # seconds
FAMILIES: Final = {4: "IPv4", 16: "IPv6"}  # by the length of an address


@dataclass(frozen=True, slots=True)
class Fault:
    """No answer, or none that counts: half a sentence to a person, without the name of the source."""

    reason: str


class Prefix(NamedTuple):
    """What a router delegates: an address only together with a suffix."""

    address: bytes
    length: int  # bits


Answer: TypeAlias = bytes | Prefix | Fault


# --- one address


def is_publishable(address: bytes, allow: tuple[Network, ...] = ()) -> bool:
    """Tell whether an address may stand in the public DNS; `allow` has ranges that may although not public.

    Of IPv6 that is 2000::/3 without the special ranges, and never a prefix with nothing behind it.
    """
    if len(address) == 4:
        return is_public(address) or inside(address, allow)
    usual = address[0] >> 5 == 1 and is_public(address)
    return any(address[8:]) and (usual or inside(address, allow))


def merged(address: bytes, suffix: bytes, bits: int) -> bytes:
    """Return the first `bits` bits of an IPv6 address with the rest of `suffix` behind them."""
    host = (1 << (128 - bits)) - 1
    return ((int.from_bytes(address) & ~host) | (int.from_bytes(suffix) & host)).to_bytes(16)


def candidate(answer: Answer, length: int, wanted: Wanted) -> bytes | Fault:
    """Return the address of a family that an answer stands for, or what is wrong with it."""
    if isinstance(answer, Fault):
        return answer
    address = answer.address if isinstance(answer, Prefix) else answer
    if len(address) != length:
        return Fault(f"said {to_text(address)}, which is no {FAMILIES[length]} address")
    if isinstance(answer, Prefix) and (fault := _too_short(answer, wanted)):
        return fault
    return address if wanted.suffix is None else merged(address, wanted.suffix, wanted.prefix_length)


def _too_short(prefix: Prefix, wanted: Wanted) -> Fault | None:
    text = f"{to_text(prefix.address)}/{prefix.length}"
    if wanted.suffix is None:
        return Fault(f"knows the prefix {text} and no address: give the suffix of this host")
    if wanted.prefix_length > prefix.length:
        return Fault(
            f"knows the prefix {text}, while {wanted.prefix_length} bits are wanted:"
            f" write the suffix with /{prefix.length}, the bits of the subnet in it"
        )
    return None


_CARRIER: Final = bytes((100, 64))  # 100.64.0.0/10


def is_carriers(address: bytes) -> bool:
    """Tell whether an address is from the range between a carrier's NAT and its customers (RFC 6598)."""
    return len(address) == 4 and address[0] == _CARRIER[0] and address[1] & 0xC0 == _CARRIER[1]


def is_witness(source: str) -> bool:
    """Tell whether a source knows the line itself, and not what arrives at the other end of it."""
    return source.startswith(("fritzbox", "igd", "interface:"))


# --- many answers


class Poll:
    """The question for the address of one family, put to its sources.

    Ask whom `ask` names, tell each answer to `hear`, and go on until there is an `outcome`.
    """

    def __init__(
        self,
        length: int,
        wanted: Wanted,
        sources: Sequence[str],
        quorum: int,
        allow: tuple[Network, ...] = (),
    ) -> None:
        self._length, self._wanted, self._quorum, self._allow = length, wanted, quorum, allow
        self._sources = tuple(dict.fromkeys(sources))
        self._waiting = list(self._sources)
        self._asked: set[str] = set()
        self._said: dict[str, bytes] = {}
        self._rejected: dict[str, bytes] = {}
        self._faults: dict[str, str] = {}

    def ask(self) -> tuple[str, ...]:
        """Return who is to be asked now: all witnesses, and as many as the quorum may still need."""
        if self.outcome is not None:
            return ()
        near = [source for source in self._waiting if is_witness(source)]
        short = self._quorum - max(map(len, self._votes().values()), default=0) - len(self._asked)
        far = [source for source in self._waiting if not is_witness(source)]
        batch = near + far[: max(0, short - len(near))]
        self._waiting = [source for source in self._waiting if source not in batch]
        self._asked.update(batch)
        return tuple(batch)

    def hear(self, source: str, answer: Answer) -> None:
        """Take the answer of a source that was asked."""
        self._asked.remove(source)
        found = candidate(answer, self._length, self._wanted)
        if isinstance(found, Fault):
            self._faults[source] = found.reason
        elif is_publishable(found, self._allow):
            self._said[source] = found
        else:
            self._rejected[source] = found

    @property
    def outcome(self) -> Known | Unavailable | None:
        """What it amounts to; None: not known yet."""
        if any(map(is_witness, self._asked)):
            return None
        if self._carriers():
            return Unavailable(Why.REJECTED, self._behind_carrier())
        agreed = self._agreed()
        if agreed is not None:
            return Known(agreed, tuple(sorted(self._votes()[agreed], key=self._sources.index)))
        return None if self._asked or self._waiting else self._unavailable()

    @property
    def cgnat(self) -> bool:
        """Whether IPv4 does not end here: a witness says so, or has another address than all others see."""
        near = {address for source, address in self._said.items() if is_witness(source)}
        far = {address for source, address in self._said.items() if not is_witness(source)}
        differ = bool(near and far) and near.isdisjoint(far)
        return self._length == 4 and (differ or bool(self._carriers()))

    @property
    def behind(self) -> frozenset[str]:
        """Who failed, or said another address than the one that was agreed on."""
        outcome = self.outcome
        right = outcome.address if isinstance(outcome, Known) else None
        wrong = {source for source, said in self._said.items() if right is not None and said != right}
        return frozenset(self._faults.keys() | self._rejected.keys() | wrong)

    def _votes(self) -> dict[bytes, list[str]]:
        votes: dict[bytes, list[str]] = {}
        for source, address in self._said.items():
            votes.setdefault(address, []).append(source)
        return votes

    def _agreed(self) -> bytes | None:
        votes = self._votes()
        enough = [address for address, sources in votes.items() if len(sources) >= self._quorum]
        if not enough and not self._asked and list(votes) == [self._wanted.known]:
            return self._wanted.known
        return enough[0] if enough else None

    def _carriers(self) -> list[str]:
        return [
            source
            for source, address in self._rejected.items()
            if is_witness(source) and is_carriers(address)
        ]

    # --- sentences

    def _behind_carrier(self) -> str:
        source = self._carriers()[0]
        return (
            f"{source} says {to_text(self._rejected[source])}: IPv4 passes a carrier's NAT (CGNAT), so nobody"
            " outside can reach this host over it. Keep IPv6 alone (families: [ipv6]), or ask the provider"
            " for an IPv4 address of your own"
        )

    def _unavailable(self) -> Unavailable:
        if self._said:
            return Unavailable(Why.DISAGREE, self._no_quorum())
        if self._rejected:
            return Unavailable(Why.REJECTED, self._listed(self._rejections()))
        text = f"no source told the {FAMILIES[self._length]} address: {self._listed(self._failures())}."
        return Unavailable(Why.FAILED, f"{text} See the network of this host, or name other sources")

    def _no_quorum(self) -> str:
        said = (f"{', '.join(sources)}: {to_text(address)}" for address, sources in self._votes().items())
        rest = [*said, *self._rejections(), *self._failures()]
        return (
            f"{self._quorum} sources have to agree on a change of the {FAMILIES[self._length]} address: "
            + self._listed(rest)
        )

    def _rejections(self) -> list[str]:
        return [f"{source}: {to_text(each)}, {_why_not(each)}" for source, each in self._rejected.items()]

    def _failures(self) -> list[str]:
        return [f"{source}: {reason}" for source, reason in self._faults.items()]

    def _listed(self, parts: Iterable[str]) -> str:
        return "; ".join(parts) or "there is none"


def _why_not(address: bytes) -> str:
    if is_carriers(address):
        return "which is a carrier's address (CGNAT)"
    if len(address) == 16 and any(address) and not any(address[8:]):
        return "which is a prefix and no address: give the suffix of this host"
    return "which is not public: nobody outside could reach it (allowRanges permits it)"


class Standing:
    """Which sources of one family are behind, and until when."""

    def __init__(self) -> None:
        self._until: dict[str, float] = {}

    def order(self, sources: Iterable[str], now: float) -> tuple[str, ...]:
        """Return the sources as they are to be asked: those behind last, the longest behind before others."""
        return tuple(sorted(sources, key=lambda source: max(now, self._until.get(source, now))))

    def settle(self, poll: Poll, now: float) -> None:
        """Take what a poll showed: who was right is behind no longer."""
        outcome = poll.outcome
        right = outcome.sources if isinstance(outcome, Known) else ()
        kept = {source: time for source, time in self._until.items() if time > now and source not in right}
        self._until = kept | dict.fromkeys(poll.behind, now + BEHIND)


def found(poll: Poll | None) -> Finding:
    """Return what a family's poll found; a family without one is not managed."""
    return NotManaged() if poll is None or poll.outcome is None else poll.outcome
