from __future__ import annotations

import aiohttp
import pytest
from web_server import Resolver, authority


@pytest.fixture(scope="session")
def ca(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("ca"))


@pytest.fixture(autouse=True)
def _no_lookup_leaves_the_host(monkeypatch):
    monkeypatch.setattr(aiohttp, "ThreadedResolver", Resolver)
