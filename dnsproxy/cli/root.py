"""The root of all commands, and how each of them ends: one message where it failed, and its exit code."""

from __future__ import annotations

import sys
from contextlib import redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, NoReturn

import click
from click.shell_completion import get_completion_class

from dnsproxy import __version__
from dnsproxy.cli import (
    cache,
    check,
    doctor,
    domains,
    monitor,
    options,
    output,
    policy,
    state,
    status,
    template,
    why,
)
from dnsproxy.errors import DnsproxyError, DocumentError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

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
While it runs:
  dnsproxy status                          is all well?
  dnsproxy monitor                         who asks for what, live
  dnsproxy why ADDRESS                     why is this address open, or not?
  dnsproxy doctor                          what keeps it from working here?

\b
Exit codes:
  0 fine       1 failed, or denied   2 wrong usage   3 configuration
  4 network    5 rights              6 kernel
"""


@click.group(cls=options.Group, help=HELP)
@click.version_option(__version__, prog_name="dnsproxy", message="%(prog)s %(version)s")
def cli() -> None:
    """Hold the commands together."""


def main() -> NoReturn:
    """Run the command line; an error of ours is one message on standard error, and its exit code."""
    out, err = output.Outlet(sys.stdout), output.Outlet(sys.stderr)
    with redirect_stdout(out), redirect_stderr(err):
        code = _ended()
        out.flush()
        err.flush()
    sys.exit(code)


def _ended() -> int:
    """Run the command that is asked for and return its exit code."""
    try:
        return cli(prog_name="dnsproxy", standalone_mode=False) or 0
    except DnsproxyError as error:
        return _failed([error])
    except ExceptionGroup as group:
        ours, others = group.split(DnsproxyError)
        if ours is None or others is not None:
            raise  # a fault of the program is not to be mistaken for one of the user's
        return _failed(list(_leaves(ours)))
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except click.Abort:
        print("dnsproxy: stopped", file=sys.stderr)
        return 1


def _leaves(group: ExceptionGroup[DnsproxyError]) -> Iterator[DnsproxyError]:
    for each in group.exceptions:
        if isinstance(each, ExceptionGroup):
            yield from _leaves(each)
        else:
            yield each


def _failed(errors: Sequence[DnsproxyError]) -> int:
    """Say what failed, each thing once; return the exit code of the first."""
    told = [
        line
        for error in errors
        for line in (
            map(str, output.in_order(error.problems))
            if isinstance(error, DocumentError)
            else [f"dnsproxy: {error}"]
        )
    ]
    print(*dict.fromkeys(told), sep="\n", file=sys.stderr)
    return errors[0].exit_code


@cli.command()
@click.option(
    "--take-over", is_flag=True, help="Replace the running instance: it hands its sockets over, and ends."
)
@options.config
def run(config: Path, *, take_over: bool) -> int:
    """Serve until stopped.

    \b
      dnsproxy run --config config/demo.yaml
      dnsproxy run --take-over               an upgrade without systemd: no query is lost

    SIGHUP reads settings and policies again, SIGUSR1 logs statistics, SIGUSR2 reopens the query log,
    SIGTERM and Ctrl-C stop. The sets stay as they are.
    """  # noqa: D301 - \b is click's sign not to wrap what follows
    from dnsproxy import app  # noqa: PLC0415
    from dnsproxy.cli import inputs  # noqa: PLC0415

    return app.run(inputs.settings(config), config_path=config, take_over=take_over)


@cli.command()
def demo() -> int:
    """See it work, in network namespaces of its own.

    Needs root, or a system that allows unprivileged user namespaces. Shows each step with the real commands
    and their output, and cleans up, also on Ctrl-C.
    """
    from dnsproxy.demo import walk  # noqa: PLC0415

    return walk.main()


@cli.command()
def version() -> None:
    """Print the version."""
    print(f"dnsproxy {__version__}")


@cli.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print what makes a shell complete commands, options and endpoints.

    \b
      dnsproxy completion bash > /usr/share/bash-completion/completions/dnsproxy
      dnsproxy completion zsh > /usr/share/zsh/vendor-completions/_dnsproxy
      dnsproxy completion fish > /usr/share/fish/vendor_completions.d/dnsproxy.fish
    """  # noqa: D301 - \b is click's sign not to wrap what follows
    made = get_completion_class(shell)
    if made is not None:  # click knows all three
        print(made(cli, {}, "dnsproxy", "_DNSPROXY_COMPLETE").source())


for command in (
    check.check, policy.policy, template.template, status.status, state.reload, monitor.monitor, why.why,
    cache.cache, cache.names, cache.zombies, state.endpoints, state.sets, doctor.doctor,
    domains.domains, domains.dyndns,
):  # fmt: skip
    cli.add_command(command)
