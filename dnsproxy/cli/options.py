"""What the commands share: how help looks, the options that several have, and what the shell completes.

Imports that take long (the documents' models, the loop, YAML) stand inside the functions that need them, in
all of this package, so that help, completion and whatever only asks the daemon answer at once; that is the
reason for every PLC0415.
"""

from __future__ import annotations

import inspect
from functools import update_wrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.shell_completion import CompletionItem

from dnsproxy.errors import DnsproxyError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from click import Context, Parameter

DEFAULT_CONFIG = Path("/etc/dnsproxy/dnsproxy.yaml")
SETTINGS = {"help_option_names": ["-h", "--help"]}


class Group(click.Group):
    """Commands under one word, each with its whole first sentence in the list."""

    def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401 - click's own
        options.setdefault("no_args_is_help", True)
        super().__init__(*arguments, context_settings=SETTINGS, **options)

    def add_command(self, cmd: click.Command, name: str | None = None) -> None:
        """Add a command; its line in the list is the first of its help, which click would cut."""
        cmd.context_settings = SETTINGS
        cmd.short_help = cmd.short_help or inspect.cleandoc(cmd.help or "").partition("\n")[0]
        super().add_command(cmd, name)


def _endpoints_of_files(context: Context, _: Parameter, incomplete: str) -> list[CompletionItem]:
    from dnsproxy.cli import inputs  # noqa: PLC0415

    settings = inputs.settings(Path(context.params.get("config") or DEFAULT_CONFIG))
    table, _policy = inputs.load(inputs.texts([settings.policy.directory]), settings)
    return _beginning(incomplete, (each.key for each in table.endpoints))


def _endpoints_of_daemon(context: Context, _: Parameter, incomplete: str) -> list[CompletionItem]:
    from dnsproxy.cli import client  # noqa: PLC0415

    given = context.params.get("socket"), Path(context.params.get("config") or DEFAULT_CONFIG)
    rows = client.connect(*given).get("/v1/endpoints")
    return _beginning(incomplete, (row["endpoint-id"] for row in rows))


def types(_: Context, __: Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the type of a query."""
    from dnslib import QTYPE  # noqa: PLC0415

    return _beginning(incomplete.upper(), QTYPE.reverse)


def _beginning(incomplete: str, words: Iterable[str]) -> list[CompletionItem]:
    """Return the words that go on as typed; an endpoint's name may be typed without its namespace."""
    found = {
        each for each in words if each.startswith(incomplete) or each.partition("/")[2].startswith(incomplete)
    }
    return [CompletionItem(each) for each in sorted(found)]


def _quiet(complete: Callable[..., list[CompletionItem]]) -> Callable[..., list[CompletionItem]]:
    """Return the same without complaints: a line that is being typed is no place for them."""

    def completed(context: Context, parameter: Parameter, incomplete: str) -> list[CompletionItem]:
        try:
            return complete(context, parameter, incomplete)
        except DnsproxyError:
            return []

    return completed


running_endpoints = _quiet(_endpoints_of_daemon)
config = click.option(
    "--config", "-c", metavar="FILE", envvar="DNSPROXY_CONFIG", type=click.Path(path_type=Path),
    default=DEFAULT_CONFIG, show_default=True, show_envvar=True, help="The settings.",
)  # fmt: skip
socket = click.option(
    "--socket", metavar="PATH", envvar="DNSPROXY_SOCKET", type=click.Path(path_type=Path), show_envvar=True,
    help="Where the daemon listens, instead of admin.socket in the settings.",
)  # fmt: skip
output = click.option(
    "--output", "-o", type=click.Choice(["table", "json", "yaml"]), default="table", show_default=True,
    help="How to print it.",
)  # fmt: skip
pattern = click.option(
    "--matchpattern", "-p", "pattern", metavar="PATTERN", help="These names only, such as '*.example.com'."
)


def endpoint(*, running: bool, required: bool = False) -> Callable[..., Any]:
    """Return the option that names an endpoint, one of the running daemon's or of the files'."""
    names = "NAMESPACE/NAME, or NAME" if running else "NAMESPACE/NAME, NAME, or a client's address"
    return click.option(
        "--endpoint", "-e", metavar="ENDPOINT", required=required, help=f"Who asks: {names}.",
        shell_complete=running_endpoints if running else _quiet(_endpoints_of_files),
    )  # fmt: skip


def asks_daemon(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command the options that find the daemon, and the daemon itself as its first argument."""

    def asking(socket: Path | None, config: Path, **others: Any) -> Any:  # noqa: ANN401 - click's own
        from dnsproxy.cli import client  # noqa: PLC0415

        return command(client.connect(socket, config), **others)

    return socket(config(update_wrapper(asking, command)))
