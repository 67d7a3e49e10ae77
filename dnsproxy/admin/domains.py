"""The records that DynDNS keeps, as objects: what `/v1/domains` answers with."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from dnsproxy.dyndns.status import document

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dnsproxy.dyndns.sync import Sync

EVENTS: Final = 20  # of one record that are shown with it


def rows(sync: Sync | None) -> Iterator[dict[str, Any]]:
    """Yield all records, each as the document that it is, with its status."""
    for view, shown in sync.views() if sync is not None else ():
        yield document(view.domain, shown)


def row(sync: Sync | None, name: str) -> dict[str, Any] | None:
    """Return one record with its last events, by its host name, its own name, or NAMESPACE/NAME."""
    wanted = name.lower().removesuffix(".")
    for view, shown in sync.views() if sync is not None else ():
        domain = view.domain
        if wanted in (domain.hostname, domain.fqdn.lower(), domain.name, f"{domain.namespace}/{domain.name}"):
            found = [event.row() for event in sync.events if event.object == domain.title] if sync else []
            return document(domain, shown) | {"events": found[-EVENTS:]}
    return None


def summary(sync: Sync | None) -> dict[str, Any]:
    """Return how many records there are, and what is the matter with which."""
    return {"records": sum(1 for _ in rows(sync)), "problems": sync.problems() if sync is not None else []}
