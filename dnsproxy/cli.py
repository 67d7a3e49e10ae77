"""The command line: arguments -> one call.

Imports that take long (the documents' models, pyroute2, the loop) stand inside the commands that need them,
so that help, completion and `version` answer at once; that is the reason for every PLC0415 below.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn, TypeAlias

import typer

from dnsproxy import __version__
from dnsproxy.errors import DnsproxyError, DocumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dnsproxy.config import Config
    from dnsproxy.endpoints import Endpoint, EndpointTable
    from dnsproxy.errors import Problem
    from dnsproxy.rules.policy import Grant, Policy, Verdict

Texts: TypeAlias = "list[tuple[str, str]]"  # (file, text)

DEFAULT_CONFIG = Path("/etc/dnsproxy/dnsproxy.yaml")

HELP = """\
A DNS proxy that enforces names: the addresses in an allowed answer are in nftables sets before it leaves.

\b
Start here:
  dnsproxy demo                            see it work, in network namespaces of its own
  dnsproxy check                           check the settings and all policies
  dnsproxy policy trace -e ENDPOINT NAME   would this name be allowed, and by which rule?
  dnsproxy template forward                firewall rules that use the sets
  dnsproxy run                             serve

\b
Exit codes:
  0 fine       1 failed, or denied   2 wrong usage   3 configuration
  4 network    5 rights              6 kernel
"""

TEMPLATE_HELP = """\
Print nftables rules that use the sets.

They are made from the settings, the Endpoint documents, and which endpoints a policy selects, for `nft -f`.

\b
  dnsproxy template forward > forward.nft
  nft -f forward.nft
"""

plain = partial(
    typer.Typer,
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: quick, the same in a pager, and never coloured
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
cli = plain(help=HELP)
policy_cli = plain(help="Ask the policies.")
template_cli = plain(help=TEMPLATE_HELP)
cli.add_typer(policy_cli, name="policy")
cli.add_typer(template_cli, name="template")

ConfigOption = Annotated[
    Path, typer.Option("--config", "-c", metavar="FILE", envvar="DNSPROXY_CONFIG", help="The settings.")
]


def main() -> NoReturn:
    """Run the command line; an error of ours is one message on standard error, and its exit code."""
    try:
        cli(prog_name="dnsproxy")
    except DocumentError as error:
        for problem in _sorted(error.problems):
            print(problem, file=sys.stderr)
        sys.exit(error.exit_code)
    except DnsproxyError as error:
        print(f"dnsproxy: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    sys.exit(0)


def _sorted(problems: Iterable[Problem]) -> list[Problem]:
    return sorted(problems, key=lambda problem: (problem.file, problem.line, problem.column))


# -- run, demo, version ---------------------------------------------------------------------------------


@cli.command()
def run(config: ConfigOption = DEFAULT_CONFIG) -> None:
    """Serve until stopped.

    \b
      dnsproxy run --config config/demo.yaml

    SIGHUP reads settings and policies again, SIGUSR1 logs statistics, SIGUSR2 reopens the query log,
    SIGTERM and Ctrl-C stop. The sets stay as they are.
    """  # noqa: D301 - \b is typer's sign not to wrap what follows
    from dnsproxy import app  # noqa: PLC0415

    raise typer.Exit(app.run(_settings(config), config_path=config))


@cli.command()
def demo() -> None:
    """See it work, in network namespaces of its own.

    Needs root, or a system that allows unprivileged user namespaces. Shows each step with the real commands
    and their output, and cleans up, also on Ctrl-C.
    """
    from dnsproxy.demo import walk  # noqa: PLC0415

    raise typer.Exit(walk.main())


@cli.command()
def version() -> None:
    """Print the version."""
    print(f"dnsproxy {__version__}")


# -- check ----------------------------------------------------------------------------------------------


@cli.command()
def check(
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[PATH]...", help="Policy files or folders to check instead of the configured ones."
        ),
    ] = None,
    config: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Check the settings and all policies.

    \b
      dnsproxy check                        everything that `run` would read
      dnsproxy check --config new.yaml      other settings
      dnsproxy check policies.d new.yaml    these policy documents only

    Exit 0: all is well, 3: something is wrong. Faults are FILE:LINE:COLUMN: PATH: MESSAGE, on standard error.
    Notes tell what a document asks for that is not enforced here, and what does not do what it seems to.
    """  # noqa: D301 - \b is typer's sign not to wrap what follows
    settings = None if paths else _settings(config)
    faults, notes = _checked_settings(settings) if settings else ([], [])
    try:
        texts = _texts([settings.policy.directory] if settings else paths or [])
        table, policy = _load(texts, settings)
    except DocumentError as error:
        faults += error.problems
    if faults:
        raise DocumentError(faults)
    _report(texts, table, [*notes, *policy.notes])


def _checked_settings(settings: Config) -> tuple[list[Problem], list[Problem]]:
    """Return what is wrong with the servers and files that the settings name, and what is left out."""
    faults: list[Problem] = []
    notes: list[Problem] = []
    for step in (_check_loops, _check_zone, _check_resolv_conf, _check_events):
        try:
            notes += step(settings)
        except DocumentError as error:
            faults += error.problems
    return faults, notes


def _check_loops(settings: Config) -> list[Problem]:
    from dnsproxy.config import check_loops  # noqa: PLC0415

    check_loops(settings, _local_addresses(settings))
    return []


def _check_zone(settings: Config) -> list[Problem]:
    if settings.upstream.zone is not None:
        from dnsproxy import files  # noqa: PLC0415
        from dnsproxy.demo import zone  # noqa: PLC0415

        zone.read(files.read_text(settings.upstream.zone), str(settings.upstream.zone))
    return []


def _check_resolv_conf(settings: Config) -> list[Problem]:
    path = settings.upstream.resolv_conf
    if settings.upstream.zone is not None or settings.upstream.servers or path is None:
        return []
    from dnsproxy import files  # noqa: PLC0415
    from dnsproxy.config import upstreams_of  # noqa: PLC0415

    _, notes = upstreams_of(settings, files.read_text(path), str(path), _local_addresses(settings))
    return notes


def _check_events(settings: Config) -> list[Problem]:
    from dnsproxy import files  # noqa: PLC0415
    from dnsproxy.config import STDOUT  # noqa: PLC0415

    if settings.events.file not in (None, STDOUT):
        files.check_writable(settings.events.file)
    return []


def _local_addresses(settings: Config) -> frozenset[bytes]:
    """Return this host's addresses where they matter, which is for listeners on every address."""
    if not any(listener.is_wildcard for listener in settings.listen):
        return frozenset()
    from dnsproxy import host  # noqa: PLC0415

    return host.read()


def _report(texts: Texts, table: EndpointTable, notes: Iterable[Problem]) -> None:
    for note in _sorted(notes):
        message = f"{note.path}: {note.message}" if note.path else note.message
        print(replace(note, path="note", message=message))
    documents, policies = _counts(texts)
    counted = (
        _counted(documents, "document", "documents"),
        _counted(len(table.endpoints), "endpoint", "endpoints"),
        _counted(policies, "policy", "policies"),
    )
    print(f"{', '.join(counted)}: ok")


def _counted(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _counts(texts: Texts) -> tuple[int, int]:
    """Return how many documents there are, and how many of them are policies."""
    from dnsproxy.yamldoc import parse  # noqa: PLC0415

    kinds = [str(document.value["kind"]) for file, text in texts for document in parse(text, file)]
    return len(kinds), sum(kind.endswith("Policy") for kind in kinds)


# -- policy ---------------------------------------------------------------------------------------------


@policy_cli.command()
def trace(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name that would be asked for.")],
    endpoint: Annotated[
        str,
        typer.Option(
            "--endpoint", "-e", metavar="ENDPOINT", help="NAMESPACE/NAME, NAME, or a client's address."
        ),
    ],
    qtype: Annotated[
        str,
        typer.Option(
            "--type", "-t", metavar="TYPE", help="Type of the query; the verdict is the same for all."
        ),
    ] = "A",
    config: ConfigOption = DEFAULT_CONFIG,
) -> None:
    """Tell whether a name would be allowed, by which rule, and what it opens.

    \b
      dnsproxy policy trace --endpoint ci-runner github.com
      dnsproxy policy trace --endpoint 10.1.0.5 --type AAAA github.com

    Exit 0: allowed, 1: denied. Asks the files, not a running proxy, and sends nothing.
    """  # noqa: D301 - \b is typer's sign not to wrap what follows
    from dnsproxy import names  # noqa: PLC0415

    wire, kind = _question(name, qtype)
    settings = _settings(config)
    table, policy = _load(_texts([settings.policy.directory]), settings)
    who = _endpoint(table, endpoint)
    verdict = policy.view(who).verdict(wire)
    print(f"{_decision(verdict)}: {names.to_text(wire)} {kind} for {who.key}")
    print(
        *_explained(verdict, restricted=policy.restricts(who), private=bool(settings.policy.private)),
        sep="\n",
    )
    stream = policy.view(who, "TCP").verdict(wire)
    if stream.allowed != verdict.allowed:
        print(f"  over TCP it is {_decision(stream)}: {stream.reason}")
    raise typer.Exit(0 if verdict.allowed else 1)


def _question(name: str, qtype: str) -> tuple[bytes, str]:
    """Return the wire name and the type as text; a usage error for what is neither."""
    from dnslib import QTYPE  # noqa: PLC0415

    from dnsproxy import names  # noqa: PLC0415

    kind = qtype.upper()
    if kind not in QTYPE.reverse and not kind.removeprefix("TYPE").isdigit():
        raise typer.BadParameter(
            f"{qtype!r} is not a type, such as A, AAAA, HTTPS or TYPE65", param_hint="--type"
        )
    try:
        return names.from_text(name), kind
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="NAME") from None


def _endpoint(table: EndpointTable, text: str) -> Endpoint:
    """Return the endpoint that is meant; if there is not exactly one, a usage error that lists them."""
    found = [each for each in table.endpoints if text in (each.key, each.name)] or _by_address(table, text)
    if len(found) == 1:
        return found[0]
    keys = ", ".join(sorted(each.key for each in found or table.endpoints))
    problem = "stands for several" if found else "is unknown; there are"
    raise typer.BadParameter(f"{text!r} {problem}: {keys}", param_hint="--endpoint")


def _by_address(table: EndpointTable, text: str) -> list[Endpoint]:
    from dnsproxy import addresses  # noqa: PLC0415

    try:
        address = addresses.unmapped(addresses.from_text(text))
    except ValueError:
        return []
    found = table.find(address)
    if found is None:
        from dnsproxy import host  # noqa: PLC0415

        found = table.with_host_addresses(host.read()).find(address)
    return [found] if found else []


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
    """Return what a grant opens, such as `tcp 22 80-82, udp 443; sets github  (ci.yaml:7)`."""
    parts = ["every port" if grant.ports is None else _ports(grant.ports)]
    if grant.sets:
        parts.append("sets " + ", ".join(grant.sets))
    if grant.cidrs:
        parts.append("also private addresses in " + ", ".join(map(str, grant.cidrs)))
    elif not private:
        parts.append("public addresses only")
    return "; ".join(parts) + f"  ({grant.rule.file}:{grant.rule.line})"


def _ports(ports: Iterable[tuple[int, int]]) -> str:
    from dnsproxy.namemanager.elements import PROTOCOLS  # noqa: PLC0415

    by_protocol = groupby(sorted(ports), key=lambda port: port[0])
    return ", ".join(f"{PROTOCOLS[number]} {_ranges(found)}" for number, found in by_protocol)


def _ranges(ports: Iterable[tuple[int, int]]) -> str:
    """Return ports as text, those in a row as a range: `22 80-82`."""
    runs = groupby(enumerate(port for _, port in ports), key=lambda pair: pair[1] - pair[0])
    found = [[port for _, port in run] for _, run in runs]
    return " ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in found)


# -- template -------------------------------------------------------------------------------------------


@template_cli.command("forward")
def template_forward(config: ConfigOption = DEFAULT_CONFIG) -> None:
    """For a router or container host: what it forwards from the endpoints."""
    from dnsproxy.namemanager import template  # noqa: PLC0415

    settings, table, governed = _template_inputs(config)
    print(template.forward(table, governed, table=settings.sets.table), end="")


@template_cli.command("output")
def template_output(config: ConfigOption = DEFAULT_CONFIG) -> None:
    """For this host itself: what its own programs connect to (the endpoint `host`)."""
    from dnsproxy.namemanager import template  # noqa: PLC0415

    settings, table, governed = _template_inputs(config)
    print(template.output(table, governed, table=settings.sets.table, mark=settings.upstream.mark), end="")


@template_cli.command("redirect")
def template_redirect(config: ConfigOption = DEFAULT_CONFIG) -> None:
    """For both: all DNS of the endpoints and of this host comes to the proxy."""
    from dnsproxy.namemanager import template  # noqa: PLC0415

    settings, table, _ = _template_inputs(config)
    port = settings.listen[0].port
    print(template.redirect(table, port=port, table=settings.sets.table, mark=settings.upstream.mark), end="")


def _template_inputs(config: Path) -> tuple[Config, EndpointTable, frozenset[str]]:
    """Return the settings, the endpoints, and the keys of those that a policy restricts."""
    settings = _settings(config)
    table, policy = _load(_texts([settings.policy.directory]), settings)
    return settings, table, frozenset(each.key for each in table.endpoints if policy.restricts(each))


# -- reading --------------------------------------------------------------------------------------------


def _settings(path: Path) -> Config:
    from dnsproxy import config, files  # noqa: PLC0415

    return config.read(files.read_text(path), str(path))


def _texts(paths: Iterable[Path]) -> Texts:
    from dnsproxy import files  # noqa: PLC0415

    return files.read_paths(paths)


def _load(texts: Texts, settings: Config | None) -> tuple[EndpointTable, Policy]:
    from dnsproxy.rules.policy import load  # noqa: PLC0415

    return load(texts, enforcement=settings.policy.enforcement if settings else "default")
