"""`dnsproxy cache`, `names`, `zombies`: what was learned, and how to forget it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dnsproxy.cli import options
from dnsproxy.cli.output import counted, moment, show, show_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from dnsproxy.cli.client import Admin
    from dnsproxy.cli.output import Columns, Row

LOOKUPS: Columns = {  # those of Cilium's `fqdn cache list`
    "Endpoint": lambda row: row["endpoint-id"],
    "Source": lambda row: row["source"],
    "FQDN": lambda row: row["fqdn"],
    "TTL": lambda row: row["ttl"],
    "ExpirationTime": lambda row: moment(row["expiration-time"]),
    "IPs": lambda row: row["ips"],
}
CLEANED: Columns = {**LOOKUPS, "Connection": lambda row: row["connection"]}
SELECTORS: Columns = {
    "Selector": lambda row: row["selector"],
    "Names": lambda row: row["names"],
    "IPs": lambda row: row["ips"],
    "Endpoints": lambda row: row["endpoints"],
}
ZOMBIES: Columns = {
    "Endpoint": lambda row: row["endpoint-id"],
    "IP": lambda row: row["ip"],
    "State": lambda row: row["state"],
    "LastAlive": lambda row: moment(row["alive-at"]),
    "Since": lambda row: moment(row["delete-pending-at"]),
    "NextLook": lambda row: moment(row["expiration-time"]),
    "Names": lambda row: _some(row["names"], row["names-total"]),
}
EVERYTHING = "*"


def _some(names: list[str], total: int) -> str:
    more = [f"and {total - len(names)} more"] if total > len(names) else []
    return ",".join([*names, *more])


@click.group(cls=options.Group)
def cache() -> None:
    """Show or forget the names and addresses that were learned."""


@cache.command("list")
@options.endpoint(running=True)
@options.pattern
@click.option("--cidr", metavar="CIDR", help="Names with an address in this range only.")
@click.option(
    "--source",
    "-s",
    type=click.Choice(["lookup", "connection", "global"]),
    help="Leases, addresses that live connections keep, or what all endpoints know together.",
)
@options.output
@options.asks_daemon
def list_(
    admin: Admin, endpoint: str | None, pattern: str | None, cidr: str | None, source: str | None, output: str
) -> None:
    """List names, their addresses, and until when these may be used.

    An address marked with * belongs to several of the listed names of its endpoint: a rule for one of them
    opens it for all. Where connections cannot be seen, an address past its lease (source connection) ends at
    its ExpirationTime; else its connections are looked for again then.

    \b
      dnsproxy cache list
      dnsproxy cache list -e ci-runner -p '*.github.com'
      dnsproxy cache list -s global -o json > preload.json
    """  # noqa: D301 - \b is click's sign not to wrap what follows
    rows = admin.get("/v1/lookups", endpoint=endpoint, matchpattern=pattern, cidr=cidr, source=source)
    show(rows, {**LOOKUPS, "IPs": _marked(rows)} if output == "table" else LOOKUPS, output)


def _marked(rows: list[Row]) -> Callable[[Row], list[str]]:
    """Return what shows the addresses of a row, those with a mark that other names of the endpoint have."""
    owners: dict[tuple[str, str], set[str]] = {}

    def key(row: Row, address: str) -> tuple[str, str]:
        return row["endpoint-id"], address

    for row in rows:
        for address in row["ips"]:
            owners.setdefault(key(row, address), set()).add(row["fqdn"])
    return lambda row: [
        f"{address}*" if len(owners[key(row, address)]) > 1 else address for address in row["ips"]
    ]


@cache.command()
@options.endpoint(running=True)
@options.pattern
@click.option("--force", "-f", is_flag=True, help="Do not ask.")
@click.option("--cut-connections", is_flag=True, help="Take addresses that connections may use as well.")
@options.asks_daemon
def clean(
    admin: Admin, endpoint: str | None, pattern: str | None, *, force: bool, cut_connections: bool
) -> None:
    """Forget names, after showing them and asking.

    Their leases end, and their addresses are learned again when asked for. An address stays in the sets while
    connections may use it, as after any lease, however often this is done. With --cut-connections also these
    go: connections to addresses that are zombies already are cut, even those that carry traffic now.

    \b
      dnsproxy cache clean -p '*.example.com'
      dnsproxy cache clean -p '*.example.com' --cut-connections
    """  # noqa: D301 - \b is click's sign not to wrap what follows
    what = {"endpoint": endpoint, "matchpattern": pattern or EVERYTHING}
    if cut_connections:
        what["connections"] = "true"
    if not force:
        rows = admin.delete("/v1/lookups", **what, dry_run="true")
        if not rows:
            print(
                "nothing to forget" + ("" if cut_connections else "; --cut-connections takes zombies as well")
            )
            return
        _preview(rows)
        click.confirm("\nForget it?", abort=True)
    gone = admin.delete("/v1/lookups", **what)
    print(f"forgotten: {counted(gone['pairs'], 'pair', 'pairs')} of name and address")


def _preview(rows: list[Row]) -> None:
    """Show what will go, and which of it carries connections."""
    print("This will be forgotten:\n")
    show(rows, CLEANED, "table")
    if any(row["source"] == "lookup" for row in rows):
        print("\nAddresses of lookups stay open while connections use them.")
    busy = [row for row in rows if row["connection"] not in (None, "idle")]
    if cut := {(row["endpoint-id"], *row["ips"]) for row in busy}:
        print(f"\nConnections to {counted(len(cut), 'address', 'addresses')} will be CUT.")


@click.command()
@options.output
@options.asks_daemon
def names(admin: Admin, output: str) -> None:
    """List the selectors of the policies, and how many names and addresses each has matched.

    JSON and YAML have the shape of Cilium's `fqdn names`, which has no numbers: only the table does.
    """
    if output == "table":
        show(admin.get("/v1/selectors"), SELECTORS, output)
    else:
        show_value(admin.get("/v1/names"), output)


@click.group(cls=options.Group, invoke_without_command=True, no_args_is_help=False)
@options.endpoint(running=True)
@options.output
@options.asks_daemon
def zombies(admin: Admin, endpoint: str | None, output: str) -> None:
    """List addresses whose lease is over and which live connections may still use.

    NextLook is when the connections are looked for again. Where they cannot be seen (state unobserved), the
    address goes then: zombies.unobserved is over.
    """
    if click.get_current_context().invoked_subcommand is None:
        _list_zombies(admin, endpoint, output)


@zombies.command("list")
@options.endpoint(running=True)
@options.output
@options.asks_daemon
def zombies_list(admin: Admin, endpoint: str | None, output: str) -> None:
    """List them, as `dnsproxy zombies` does."""
    _list_zombies(admin, endpoint, output)


def _list_zombies(admin: Admin, endpoint: str | None, output: str) -> None:
    show(admin.get("/v1/zombies", endpoint=endpoint), ZOMBIES, output)
