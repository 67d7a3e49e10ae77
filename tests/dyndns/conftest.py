from __future__ import annotations

import pytest
from web_server import authority


@pytest.fixture(scope="session")
def ca(tmp_path_factory):
    return authority(tmp_path_factory.mktemp("ca"))
