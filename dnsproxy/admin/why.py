"""Why an address is open for an endpoint, or is not: what keeps it, or what is remembered of its end.

For each endpoint three things are looked up and one is concluded:

    lookups    the names that lead to the address while their leases last, and the rules that open it
    zombie     what connections keep of it after the last lease
    elements   what the kernel has acknowledged of it in the endpoint's own sets
    reason     a sentence that says which of them decides

Sets that rules name and those of the user's are everybody's, so their elements stand apart.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dnsproxy import addresses, names
from dnsproxy.admin import views
from dnsproxy.namemanager.elements import key_suffix, key_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dnsproxy.admin.views import Row, State, Steps
    from dnsproxy.cache.lookups import LookupCache
    from dnsproxy.cache.zombies import Departed
    from dnsproxy.namemanager.elements import SetSpec
    from dnsproxy.namemanager.plan import Place
    from dnsproxy.rules.policy import View

CAUSES: Final = {
    "idle": "its connections were over",
    "unobserved": "its lease was over, and connections cannot be seen here",
    "limit": "it made room for others",
    "evicted live": "it made room for others although it carried a connection",
    "forced": "it was cleaned away",
    "dropped": "its endpoint was removed",
    "off": "its lease was over, and nothing is kept for connections",
}


def why(state: State, address: bytes, endpoint: str | None = None) -> Steps:
    """Explain one address, for one endpoint or for all that know of it; the last step is the row."""
    found: list[Row] = []
    for key in state.keys(endpoint):
        row = _explained(state, key, address)
        if endpoint is not None or _known(row):
            found.append(row)
        yield []
    shared = [spec for spec, owner in views.specs(state) if not owner]
    yield [
        {
            "address": addresses.to_text(address),
            "endpoints": found,
            "shared": [each for spec in shared for each in _elements(state, spec, [address])],
            "global": views.short(state.plan.caches.global_.holders(address)),
        }
    ]


def _known(row: Row) -> bool:
    return any(row[part] for part in ("lookups", "zombie", "elements", "departed", "not-learned"))


def _own(state: State, place: Place, address: bytes) -> list[Row]:
    """Return the elements in an endpoint's own sets, for all ports that its rules name."""
    ports = {
        port
        for statement in state.plan.policy.selecting(place.view.endpoint)
        for _, grant in statement.connects
        for port in grant.ports or ()
    }
    version = 4 if len(address) == 4 else 6
    keys = [address + key_suffix(*port) for port in sorted(ports)]
    return [
        *_elements(state, place.sets[False, version], [address]),
        *_elements(state, place.sets[True, version], keys),
    ]


def _elements(state: State, spec: SetSpec, keys: Iterable[bytes]) -> list[Row]:
    applied = state.plan.applied.get(spec, {})
    return [_element(spec, key, applied[key]) for key in keys if key in applied]


def _element(spec: SetSpec, key: bytes, name: str) -> Row:
    return {"set": str(spec), "element": key_text(key), "name": name}


def _explained(state: State, key: str, address: bytes) -> Row:
    caches, ahead = state.plan.caches, state.ahead()
    cache, zombies = caches.endpoints.get(key), caches.zombies.get(key)
    place = state.plan.places.get(key)
    lookups: list[Row] = []
    total = 0
    if cache is not None and place is not None:
        holders = list(cache.holders(address))
        total = len(holders)
        lookups = [_lookup(state, place.view, cache, name, address) for name in holders[: views.SHORT]]
    each = None if zombies is None else zombies.of(address)
    row = {
        "endpoint-id": key,
        "lookups": lookups,
        "lookups-total": total,
        "zombie": None if zombies is None or each is None else views.zombie(key, zombies, each, ahead),
        "elements": [] if place is None else _own(state, place, address),
        "departed": None if zombies is None else _departed(zombies.departed.get(address), ahead),
        "not-learned": _unlearned(state, key, address),
    }
    return {**row, "reason": _reason(row, enforced=state.sets.enforces)}


def _lookup(state: State, view: View, cache: LookupCache, name: bytes, address: bytes) -> Row:
    lookup, ahead = cache.lookup(name, address), state.ahead()
    assert lookup is not None, "the reverse map names a pair that is not there"
    return {
        "fqdn": names.to_text(name),
        "ttl": lookup.ttl,
        "lookup-time": views.moment(lookup.looked_up, ahead),
        "expiration-time": views.moment(lookup.expiry, ahead),
        "expired": lookup.expiry < state.clock(),
        "rules": [views.granted(grant) for grant in view.grants(name).grants],
    }


def _departed(found: Departed | None, ahead: float) -> Row | None:
    if found is None:
        return None
    return {"at": views.moment(found.when, ahead), "names": views.short(found.names), "cause": found.cause}


def _unlearned(state: State, key: str, address: bytes) -> Row | None:
    found = state.plan.unlearned.get((key, address))
    if found is None:
        return None
    at, name = found
    return {"fqdn": names.to_text(name), "at": views.moment(at, state.ahead())}


def _reason(row: dict[str, Any], *, enforced: bool) -> str:
    """Say in a sentence what decides."""
    reason = _decisive(row)
    if enforced or not row["elements"]:
        return reason
    return f"{reason.replace('open:', 'shown as open:', 1)} (sets are shown, not enforced)"


def _decisive(row: dict[str, Any]) -> str:
    if row["lookups"]:
        return _while_leased(row)
    zombie, departed, unlearned = row["zombie"], row["departed"], row["not-learned"]
    if zombie is not None:
        return {
            "unobserved": "kept: its lease is over, and connections cannot be seen here; "
            f"it stays until {zombie['expiration-time']} (zombies.unobserved)",
            "live": "kept: its lease is over, and the last look at the connections saw one to it",
            "recent": "kept: its lease is over; until the next looks at the connections it counts as in use",
            "new": "kept: its lease has just ended; two looks at the connections decide",
            "idle": "its lease is over and no connection uses it; it goes, or stays with others of its names",
        }[zombie["state"]]
    if row["elements"]:
        return "open, but nothing here wants it any more: the next repair takes it away"
    if unlearned is not None and (departed is None or departed["at"] <= unlearned["at"]):
        return (
            f"not open: answered for {unlearned['fqdn']} at {unlearned['at']} and not learned: "
            "it is a private address; permit it with `cidrs` in the rule, or with policy.private"
        )
    if departed is not None:
        return f"not open: it left at {departed['at']} since {CAUSES[departed['cause']]}"
    return "not open: no answer brought this endpoint the address, or too long ago to be remembered"


def _while_leased(row: dict[str, Any]) -> str:
    granting = [lookup for lookup in row["lookups"] if lookup["rules"]]
    if not granting:
        return f"not open: {row['lookups'][0]['fqdn']} may be asked for, but no rule lets it be connected to"
    names_ = ", ".join(lookup["fqdn"] for lookup in granting[:3])
    if not row["elements"]:
        return f"not open: {names_} grants it, but the kernel has not taken it (yet); see the sets"
    return f"open: {names_} leads to it"
