"""`dnsproxy policy`: what the policy files would say, without a running proxy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dnsproxy.cli import inputs, options

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from dnsproxy.endpoints import Endpoint, EndpointTable
    from dnsproxy.rules.policy import Grant, Policy, Verdict


@click.group(cls=options.Group)
def policy() -> None:
    """Ask the policies."""


@policy.command()
@click.argument("name", metavar="NAME")
@options.endpoint(running=False, required=True)
@click.option(
    "--type",
    "-t",
    "qtype",
    metavar="TYPE",
    default="A",
    show_default=True,
    shell_complete=options.types,
    help="Type of the query; the verdict is the same for all.",
)
@options.config
def trace(name: str, endpoint: str, qtype: str, config: Path) -> int:
    """Tell whether a name would be allowed, by which rule, and what it opens.

    \b
      dnsproxy policy trace --endpoint ci-runner github.com
      dnsproxy policy trace --endpoint 10.1.0.5 --type AAAA github.com

    Exit 0: allowed, 1: denied. Asks the files, not a running proxy, and sends nothing.
    """  # noqa: D301 - \b is click's sign not to wrap what follows
    from dnsproxy import names  # noqa: PLC0415

    wire, kind = _question(name, qtype)
    settings = inputs.settings(config)
    table, found = inputs.load(inputs.texts([settings.policy.directory]), settings)
    who = _endpoint(table, endpoint)
    asked = f"{names.to_text(wire)} {kind} for {endpoint if who is None else who.key}"
    if who is None:
        return _stranger(asked)
    verdict = found.view(who).verdict(wire)
    print(f"{_decision(verdict)}: {asked}")
    print(
        *_explained(verdict, restricted=found.restricts(who), private=bool(settings.policy.private)), sep="\n"
    )
    return _over_tcp(verdict, found, who, wire)


def _stranger(asked: str) -> int:
    print(f"refused: {asked}")
    print("  because no endpoint has this address, and an unknown client is answered REFUSED")
    return 1


def _over_tcp(verdict: Verdict, found: Policy, who: Endpoint, wire: bytes) -> int:
    stream = found.view(who, "TCP").verdict(wire)
    if stream.allowed != verdict.allowed:
        print(f"  over TCP it is {_decision(stream)}: {stream.reason}")
    return 0 if verdict.allowed else 1


def _question(name: str, qtype: str) -> tuple[bytes, str]:
    """Return the wire name and the type as text; a usage error for what is neither."""
    from dnslib import QTYPE  # noqa: PLC0415

    from dnsproxy import names  # noqa: PLC0415
    from dnsproxy.rules.pattern import mistaken  # noqa: PLC0415

    kind = qtype.upper()
    if kind not in QTYPE.reverse and not kind.removeprefix("TYPE").isdigit():
        raise click.BadParameter(
            f"{qtype!r} is not a type, such as A, AAAA, HTTPS or TYPE65", param_hint="--type"
        )
    if (wrong := mistaken(name)) is not None:
        raise click.BadParameter(wrong, param_hint="NAME")
    try:
        return names.from_text(name), kind
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="NAME") from None


def _endpoint(table: EndpointTable, text: str) -> Endpoint | None:
    """Return the endpoint that is meant, None for a stranger's address; a usage error lists them all."""
    found = [each for each in table.endpoints if text in (each.key, each.name)]
    if len(found) == 1:
        return found[0]
    if not found and (address := _address(text)) is not None:
        return _at(table, address)
    keys = ", ".join(sorted(each.key for each in found or table.endpoints))
    problem = "stands for several" if found else "is unknown; there are"
    raise click.BadParameter(f"{text!r} {problem}: {keys}", param_hint="--endpoint")


def _address(text: str) -> bytes | None:
    from dnsproxy import addresses  # noqa: PLC0415

    try:
        return addresses.unmapped(addresses.from_text(text))
    except ValueError:
        return None


def _at(table: EndpointTable, address: bytes) -> Endpoint | None:
    found = table.find(address)
    if found is None:
        from dnsproxy import host  # noqa: PLC0415

        found = table.with_host_addresses(host.read()).find(address)
    return found


def _decision(verdict: Verdict) -> str:
    return "allowed" if verdict.allowed else "denied"


def _explained(verdict: Verdict, *, restricted: bool, private: bool) -> Iterator[str]:
    yield f"  because {verdict.reason}"
    if verdict.rule is not None:
        rule = verdict.rule
        yield f"  rule    {rule.file}:{rule.line}: {rule.policy}: {rule.path}: {rule.text}"
    if not restricted:
        yield "  opens   everything: its connections are not restricted"
    elif verdict.allowed:
        opened = [_opened(grant, private=private) for grant in verdict.grants.grants]
        yield from (
            f"  opens   {line}" for line in opened or ["nothing: it may be asked for, not connected to"]
        )


def _opened(grant: Grant, *, private: bool) -> str:
    """Return what a grant opens, such as `22/tcp,80-82/tcp,443/udp; sets github  (ci.yaml:7)`."""
    from dnsproxy.namemanager.elements import ports_text  # noqa: PLC0415

    parts = ["every port" if grant.ports is None else ",".join(ports_text(grant.ports))]
    if grant.sets:
        parts.append("sets " + ", ".join(grant.sets))
    if grant.cidrs:
        parts.append("also private addresses in " + ", ".join(map(str, grant.cidrs)))
    elif not private:
        parts.append("public addresses only")
    return "; ".join(parts) + f"  ({grant.rule.file}:{grant.rule.line})"
