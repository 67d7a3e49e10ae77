"""Asking the running daemon through its unix socket."""

from __future__ import annotations

import json
import os
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dnsproxy.cli import http
from dnsproxy.cli.http import HttpError, escaped
from dnsproxy.errors import DnsproxyError, DocumentError, NetworkError, Problem, RightsError

if TYPE_CHECKING:
    from collections.abc import Iterator

DEFAULT_SOCKET = Path("/run/dnsproxy/admin.sock")
DEFAULT_CONFIG = Path("/etc/dnsproxy/dnsproxy.yaml")
_WORD = re.compile(r"\bsocket\b").search
PATIENCE = 60.0  # seconds; a repair of large sets takes some, an answer that streams has no end


class WrongError(DnsproxyError):
    """Something was asked that the daemon does not know, such as an endpoint."""

    exit_code = 2


class FaultsError(DnsproxyError):
    """The daemon found faults in files, and keeps what was in force."""

    exit_code = 3


@dataclass(frozen=True)
class Admin:
    """The daemon, as seen through its socket."""

    path: Path

    def get(self, *parts: str, **query: object) -> Any:  # noqa: ANN401 - any JSON value
        """Return what stands at a path, whose parts are escaped; parameters that are None are left out."""
        return self._value("GET", parts, query)

    def post(self, *parts: str) -> Any:  # noqa: ANN401 - any JSON value
        """Have something done, and return what it says about it."""
        return self._value("POST", parts, {})

    def delete(self, *parts: str, **query: object) -> Any:  # noqa: ANN401 - any JSON value
        """Have something removed, and return what it says about it."""
        return self._value("DELETE", parts, query)

    def lines(self, *parts: str, **query: object) -> Iterator[Any]:
        """Yield the values of a stream of JSON lines as they come, for as long as it lasts."""
        with self._ask("GET", parts, query, None) as response:
            try:
                for line in response.lines():
                    if line.strip():
                        yield json.loads(line)
            except (HttpError, OSError, ValueError) as error:
                raise self._broken(error) from None

    def _value(self, method: str, parts: tuple[str, ...], query: dict[str, object]) -> Any:  # noqa: ANN401 - any JSON value
        with self._ask(method, parts, query, PATIENCE) as response:
            try:
                return json.loads(response.read())
            except (HttpError, OSError, ValueError) as error:
                raise self._broken(error) from None

    @contextmanager
    def _ask(
        self, method: str, parts: tuple[str, ...], query: dict[str, object], patience: float | None
    ) -> Iterator[http.Response]:
        head, *rest = parts
        target = "/".join([head, *map(escaped, rest)])
        given = {key.replace("_", "-"): value for key, value in query.items() if value is not None}
        if given:
            target += "?" + "&".join(f"{key}={escaped(value)}" for key, value in given.items())
        with ExitStack() as stack:
            try:
                response = stack.enter_context(http.asked(self.path, method, target, patience))
            except (HttpError, OSError) as error:
                raise self._unreachable(error) from None
            if response.status >= 400:
                raise _refusal(response)
            yield response

    def _unreachable(self, error: Exception) -> DnsproxyError:
        match error:
            case FileNotFoundError() | ConnectionRefusedError() | NotADirectoryError():
                return NetworkError(
                    f"no daemon listens at {self.path}: start it (`dnsproxy run`), or say where it listens "
                    "(--socket, $DNSPROXY_SOCKET, or its settings with --config)"
                )
            case PermissionError():
                return RightsError(
                    f"{self.path} may not be used by user {os.geteuid()}: be root, or in the group that "
                    f"`ls -l {self.path}` shows"
                )
            case TimeoutError():
                return NetworkError(
                    f"the daemon at {self.path} gives no answer: is it stopped or overloaded?"
                )
        return NetworkError(f"{self.path} does not speak our HTTP ({error or type(error).__name__})")

    def _broken(self, error: Exception) -> DnsproxyError:
        return NetworkError(
            f"the answer from {self.path} ended in the middle ({type(error).__name__}): did the daemon stop?"
        )


def _refusal(response: http.Response) -> DnsproxyError:
    """Return the error that an answer other than success stands for."""
    try:
        said = json.loads(response.read())
        message, faults = str(said["error"]), said.get("faults") or []
    except (HttpError, OSError, ValueError, KeyError, TypeError):
        message, faults = f"the daemon answers {response.status} {response.reason}, and not why", []
    if faults:
        return FaultsError("\n".join([f"{message}:", *map(str, faults)]))
    return WrongError(message) if response.status in (400, 404) else DnsproxyError(message)


def connect(path: Path | None, config: Path) -> Admin:
    """Return the daemon at a socket, or where the settings say that it listens; nothing is sent yet."""
    return Admin(path or _configured(config))


def _configured(config: Path) -> Path:
    """Return admin.socket of the settings, read as little as that takes: they are the daemon's to check."""
    try:
        text = config.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        if config == DEFAULT_CONFIG:
            return DEFAULT_SOCKET
        raise _unreadable(config, error.strerror or "") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _unreadable(config, getattr(error, "strerror", None) or "it is not UTF-8") from None
    found = _setting(text, config)
    if found is None:
        raise NetworkError(f"admin.socket is null in {config}: this daemon listens to no command line")
    return config.parent / found


def _setting(text: str, config: Path) -> Path | None:
    if not _WORD(text):  # then there is nothing to look for, and no need to load a reader of YAML
        return DEFAULT_SOCKET
    import yaml  # noqa: PLC0415

    try:
        found = yaml.load(text, yaml.CSafeLoader) or {}
        value = (found.get("admin") or {}).get("socket", DEFAULT_SOCKET)
    except (yaml.YAMLError, AttributeError):
        raise _unreadable(config, "it is no settings file") from None
    return None if value is None else Path(str(value))


def _unreadable(config: Path, why: str) -> DocumentError:
    message = f"cannot be read for admin.socket: {why}; see `dnsproxy check`, or name the socket (--socket)"
    return DocumentError([Problem(str(config), 0, 0, "", message)])
