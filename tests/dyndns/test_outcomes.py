from __future__ import annotations

import copy
import pickle

import pytest

from dnsproxy.addresses import from_text
from dnsproxy.dyndns.outcomes import SOURCE, TEXT_KEPT, Password, Request, printable


def test_a_password_shows_itself_to_nobody_but_the_request():
    password = Password(b"geheim")
    request = Request("https://x.example/", "www.example.de", "me", password, (b"\x01\x02\x03\x04",))
    assert password.reveal() == b"geheim"
    for shown in (repr(password), str(password), f"{password}", repr(request), str([request])):
        assert "geheim" not in shown
    with pytest.raises(TypeError, match="not pickled"):
        pickle.dumps(password)
    with pytest.raises(TypeError):
        copy.copy(password)
    with pytest.raises(TypeError):
        hash(password)


def test_passwords_compare_by_their_octets():
    assert Password(b"a") == Password(b"a")
    assert Password(b"a") != Password(b"b")
    assert Password(b"a") != b"a"
    assert not Password(b"")


def test_a_fingerprint_changes_with_password_and_salt_and_is_short():
    prints = {Password(each).fingerprint(salt) for each in (b"a", b"b") for salt in ("x", "y")}
    assert len(prints) == 4
    assert {len(each) for each in prints} == {8}


def test_both_addresses_go_in_one_parameter_in_canonical_form():
    both = (from_text("93.184.216.34"), from_text("2A01:238:0:0::1"))
    assert Request("", "", "", Password(b""), both).myip == "93.184.216.34,2a01:238::1"


def test_foreign_text_becomes_one_short_line():
    assert printable("nochg\r\n\x1b[31m1.2.3.4\x00\u202e ") == "nochg [31m1.2.3.4"
    assert len(printable("x" * 10_000)) == TEXT_KEPT
    assert printable("100 %s %(a)s {0}") == "100 %s %(a)s {0}"
    assert printable("") == ""


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("https://api.ipify.org", True),
        ("dns:opendns", True),
        ("dns:cloudflare", True),
        ("fritzbox", True),
        ("fritzbox:192.168.178.1", True),
        ("igd", True),
        ("interface:eth0", True),
        ("file:/run/address", True),
        ("https://me:pass@x.example/", False),
        ("dns:other", False),
        ("interface:", False),
        ("file:relative", False),
        ("", False),
    ],
)
def test_what_a_source_may_be(text, fits):
    assert bool(SOURCE(text)) is fits
