"""DynDNS as the whole program, against a server with a test CA that plays STRATO."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from web_server import authority, reply, serving

pytestmark = pytest.mark.timeout(120)

SECRET = "geheim:Pa55/w@rd#?"
DOMAIN = """
apiVersion: dyndns.contrib.strato.com/v1alpha1
kind: Domain
metadata: {{name: www}}
spec:
  fqdn: www.example.de
  ipAddress: 93.184.216.34
  endpoint: https://127.0.0.1:{port}/nic/update
  password: {{name: strato}}
---
apiVersion: v1
kind: Secret
metadata: {{name: strato}}
stringData: {{password: "{secret}"}}
"""


class Program:
    """`dnsproxy dyndns`, or `run` with nothing to do but that, and everything that it says."""

    def __init__(self, folder, ca):
        self.folder = folder
        self.environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "SSL_CERT_FILE": ca.cafile}
        (folder / "policies").mkdir()
        settings = {
            "policy": {"directory": "policies"},
            "state": {"directory": "state"},
            "admin": {"socket": None},
            "dyndns": {"hook_command": ["/bin/sh", "-c", f"cat >> {folder}/hook; echo >> {folder}/hook"]},
        }
        (folder / "dnsproxy.yaml").write_text(yaml.safe_dump(settings))

    def write(self, port):
        (self.folder / "policies" / "domain.yaml").write_text(DOMAIN.format(port=port, secret=SECRET))

    def start(self):
        command = [sys.executable, "-m", "dnsproxy", "dyndns", "--config", str(self.folder / "dnsproxy.yaml")]
        with (self.folder / "log").open("a") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=self.environment)

    async def says(self, what, times=1):
        async with asyncio.timeout(30):
            while self.said().count(what) < times:
                assert self.process.poll() is None, self.said()
                await asyncio.sleep(0.02)

    def arguments(self):
        return Path(f"/proc/{self.process.pid}/cmdline").read_bytes().decode()

    async def told(self, what):
        """Wait until the hook was told of something; return its first words."""
        hook = self.folder / "hook"
        async with asyncio.timeout(30):
            while not hook.exists() or what not in hook.read_text():  # noqa: ASYNC110 - written by others
                await asyncio.sleep(0.02)
        return hook.read_text().split("\n\n")[0]

    def said(self):
        return (self.folder / "log").read_text()

    async def end(self, number):
        self.process.send_signal(number)
        return await asyncio.to_thread(self.process.wait, 20)


@pytest.fixture(scope="module")
def ca(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("ca"))


async def test_an_address_is_published_once_and_no_start_sends_it_again(tmp_path, ca):
    program = Program(tmp_path, ca)
    async with serving(reply(200, "good 93.184.216.34\n"), ca.context) as web:
        program.write(web.port)
        program.start()
        await program.says("DynDnsUpdateCompleted")
        hooked = await program.told("DynDnsUpdateCompleted")
        shown = program.arguments()
        assert await program.end(signal.SIGKILL) == -signal.SIGKILL
        program.start()
        await program.says("DynDnsUpdateSkipped")
        assert await program.end(signal.SIGTERM) == 0
    (seen,) = web.seen
    assert seen.query == {"hostname": "www.example.de", "myip": "93.184.216.34"}
    assert json.loads(hooked)["reason"] == "DynDnsUpdateCompleted"
    for told in (program.said(), hooked, shown, seen.target, _state(tmp_path)):
        assert SECRET not in told


async def test_a_wrong_password_halts_it_over_a_restart_and_says_what_to_do(tmp_path, ca):
    program = Program(tmp_path, ca)
    async with serving(reply(200, "badauth\n"), ca.context) as web:
        program.write(web.port)
        program.start()
        await program.says("DynDnsUpdateHalted")
        assert await program.end(signal.SIGTERM) == 0
        program.start()
        await program.says('"event": "ready"', times=2)
        assert await program.end(signal.SIGTERM) == 0
    assert len(web.seen) == 1
    assert SECRET not in program.said()


def _state(folder):
    return (folder / "state" / "state.db").read_bytes().decode("latin-1")
