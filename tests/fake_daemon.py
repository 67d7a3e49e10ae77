"""The other end of the command line: HTTP on a unix socket, with answers that a test has put there."""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingUnixStreamServer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def address_string(self):
        return "command line"

    def log_message(self, *arguments):
        """Say nothing."""

    def answer(self):
        self.server.owner.asked.append(f"{self.command} {self.path}")
        status, body, whole = self.server.owner.find(self.command, self.path)
        self.send_response(status)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        for line in body.encode().splitlines(keepends=True):
            self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
            self.wfile.flush()
        if whole:
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    do_GET = do_POST = do_DELETE = answer  # noqa: N815 - the server's names


class FakeDaemon:
    """Answers by method and path, the path without its parameters where these are not given."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.asked: list[str] = []
        self._answers: dict[str, tuple[int, str, bool]] = {}
        self._server = ThreadingUnixStreamServer(str(path), _Handler)
        self._server.daemon_threads = True
        self._server.owner = self
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def says(self, request: str, value: object, *, status: int = 200, whole: bool = True) -> None:
        """Answer a request such as `GET /v1/status` with a value as JSON, or with a text as it stands."""
        text = value if isinstance(value, str) else json.dumps(value)
        self._answers[request] = (status, text, whole)

    def find(self, method: str, path: str) -> tuple[int, str, bool]:
        for request in (f"{method} {path}", f"{method} {path.partition('?')[0]}"):
            if request in self._answers:
                return self._answers[request]
        return 404, json.dumps({"error": f"nothing is known of {path}"}), True

    def __enter__(self) -> FakeDaemon:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def deaf(path: Path) -> socket.socket:
    """Return a bound socket on which nobody answers HTTP."""
    sock = socket.socket(socket.AF_UNIX)
    sock.bind(str(path))
    sock.listen()
    return sock
