from __future__ import annotations

import base64

import pytest

from dnsproxy import addresses
from dnsproxy.dyndns.documents import ENDPOINT, Missing, Place, load
from dnsproxy.dyndns.outcomes import Password
from dnsproxy.errors import DocumentError

# The original's own sample, and a Secret as its README has it.
SAMPLE = """\
apiVersion: dyndns.contrib.strato.com/v1alpha1
kind: Domain
metadata:
  name: www-example-de
spec:
  fqdn: "www.example.de"
  enabled: true
  interval: 5
  password:
    name: strato-dyndns-password
"""
SECRET = """\
apiVersion: v1
kind: Secret
metadata:
  name: strato-dyndns-password
type: Opaque
data:
  password: {data}
"""
HIDDEN = "hunter2-geheim"


def secret(password: str = HIDDEN) -> str:
    return SECRET.format(data=base64.b64encode(password.encode()).decode() or '""')


def domain(name: str = "www", **spec: object) -> str:
    fields = {"fqdn": f"{name}.example.de", "password": "{env: PASSWORD}"} | spec
    lines = "".join(f"  {key}: {value}\n" for key, value in fields.items() if value is not None)
    head = "apiVersion: dyndns.contrib.strato.com/v1alpha1\nkind: Domain\n"
    return f"{head}metadata: {{name: {name}}}\nspec:\n{lines}"


def one(*texts: str):
    (found,) = load([("d.yaml", "---\n".join(texts))]).domains
    return found


def faults(*texts: str) -> list[str]:
    with pytest.raises(DocumentError) as caught:
        load([(f"{place}.yaml", text) for place, text in enumerate(texts)])
    return [str(problem) for problem in caught.value.problems]


def test_the_originals_sample_means_what_it_meant():
    found = one(SAMPLE, secret())
    assert (found.fqdn, found.hostname, found.username) == ("www.example.de",) * 3
    assert (found.enabled, found.interval, found.mode, found.endpoint) == (True, 300.0, "Dynamic", ENDPOINT)
    assert found.password == Password(HIDDEN.encode())
    assert found.search.ipv4 is not None
    assert found.search.ipv6 is None  # the original keeps no AAAA record


def test_defaults_are_the_originals():
    found = one(domain())
    assert (found.enabled, found.interval) == (True, 300.0)


def test_a_fixed_address_is_manual_mode_and_looks_for_nothing():
    found = one(domain(ipAddress="93.184.216.34"))
    assert found.mode == "Manual"
    assert [each.address for each in found.fixed] == [addresses.from_text("93.184.216.34")]
    assert found.search.ipv4 is found.search.ipv6 is None


def test_both_families_may_come_from_two_places():
    found = one(domain(ipAddress="93.184.216.34", families="[ipv6, ipv4]", suffix='"::1:2/56"'))
    assert found.mode == "Dynamic"
    assert found.search.ipv4 is None
    assert found.search.ipv6.prefix_length == 56
    assert found.search.ipv6.suffix == addresses.from_text("::1:2")


@pytest.mark.parametrize(
    ("spec", "families"),
    [
        ({}, "4"),
        ({"families": "[ipv6]"}, "6"),
        ({"families": "[ipv6, ipv4]"}, "46"),
        ({"suffix": '"::1/64"'}, "6"),
    ],
)
def test_families(spec, families):
    search = one(domain(**spec)).search
    assert families == ("4" if search.ipv4 else "") + ("6" if search.ipv6 else "")


def test_an_international_name_is_sent_in_a_labels():
    assert one(domain(fqdn="Straße.Example.de")).hostname == "xn--strae-oqa.example.de"
    assert one(domain(fqdn="WWW.Example.DE")).hostname == "www.example.de"


@pytest.mark.parametrize(
    ("spec", "what"),
    [
        ({"fqdn": '"*.example.de"'}, "no wildcards"),
        ({"fqdn": "localhost"}, "single label"),
        ({"fqdn": ".".join(["a" * 60] * 5)}, "253 is the most"),
        ({"fqdn": "a" * 64 + ".de"}, "no label"),
        ({"fqdn": "_x.example.de"}, "no label"),
        ({"fqdn": "www.example.de."}, "empty label"),
        ({"fqdn": "1.2.3.4"}, "is an address"),
        ({"fqdn": '"2a01::1"'}, "no label"),
        ({"fqdn": "-a.example.de"}, "no label"),
        ({"fqdn": '"a b.example.de"'}, "no label"),
        ({"fqdn": '"www.example.de\\n"'}, "no label"),
        ({"fqdn": '"\u2026.example.de"'}, ""),
        ({"interval": 4}, "expected 5 or more"),
        ({"interval": 2**31}, "or less"),
        ({"interval": '"5"'}, "expected a whole number"),
        ({"enabled": '"yes"'}, "expected true or false"),
        ({"ipAddress": "010.1.1.1"}, "no IPv4 address"),
        ({"ipAddress": "10.1.1.1"}, "not public"),
        ({"ipAddress": "0.0.0.0"}, "not public"),
        ({"ipAddress": "100.64.0.1"}, "not public"),
        ({"ipAddress": "224.0.0.1"}, "not public"),
        ({"ipv6Address": '"fe80::1%eth0"'}, "no IPv6 address"),
        ({"ipv6Address": '"::ffff:1.2.3.4"'}, "no IPv6 address"),
        ({"ipv6Address": '"2001:db8::1"'}, "not public"),
        ({"families": "[]"}, "empty"),
        ({"families": "[ipv5]"}, "'ipv4' or 'ipv6'"),
        ({"families": "[ipv6]", "ipAddress": "93.184.216.34"}, "ipv4 is not among the families"),
        ({"suffix": '"1::1/64"'}, "reach into the 64 bits"),
        ({"suffix": '"::100:0:0:0:1/57"'}, "reach into the 57 bits"),
        ({"suffix": '"::1"'}, "such as ::1/64"),
        ({"suffix": '"::/64"'}, "without host bits"),
        ({"suffix": '"::1/64"', "ipv6Address": '"2a01::1"'}, "takes no suffix"),
        ({"password": "{}"}, "expected one of name"),
        ({"password": '{name: ""}'}, "empty"),
        ({"password": "{name: a, env: B}"}, "expected one of name"),
        ({"password": HIDDEN}, "expected a mapping"),
        ({"password": "{file: relative}"}, "no absolute path"),
        ({"password": None}, "required"),
        ({"endpoint": "http://dyndns.strato.com/nic/update"}, "could be read on the way"),
        ({"endpoint": "https://me:geheim@dyndns.strato.com/nic/update"}, "HOST/PATH alone"),
        ({"username": '"a:b"'}, "no colon"),
        ({"sources": "{ipv4: [ftp://x]}"}, "no source"),
        ({"sources": "{ipv4: [fritzbox]}", "quorum": 2}, "cannot make 2"),
        ({"refreshDays": 24}, "expected 25 or more"),
        ({"ipaddress": "93.184.216.34"}, "did you mean 'ipAddress'"),
    ],
)
def test_what_could_never_work_is_refused_at_its_place(spec, what):
    (fault,) = faults(domain(**spec))
    line = fault.split(":")
    assert line[0] == "0.yaml"
    assert int(line[1]) >= 4
    assert int(line[2]) >= 1
    assert what in fault
    assert HIDDEN not in fault
    assert "geheim" not in fault


def test_ranges_that_are_allowed_are_published():
    assert one(domain(ipAddress="10.1.1.1", allowRanges="[10.0.0.0/8]")).fixed


def test_a_host_with_two_owners_is_an_error_in_both_places():
    found = faults(domain("a", fqdn="www.example.de"), domain("b", fqdn="WWW.example.de", enabled="false"))
    assert [fault[: fault.index(": ")] for fault in found] == ["0.yaml:5:9", "1.yaml:5:9"]
    assert all("www.example.de stands in 2 Domains" in fault for fault in found)


def test_two_objects_of_one_name_are_an_error():
    found = faults(domain("a"), domain("a", fqdn="b.example.de"))
    assert all("Domain default/a stands more than once" in fault for fault in found)
    assert len(found) == 2


def test_a_secret_may_come_later_and_says_so():
    loaded = load([("d.yaml", SAMPLE)])
    (found,) = loaded.domains
    assert isinstance(found.password, Missing)
    assert str(loaded.notes[0]).startswith("d.yaml:10:5: spec.password: the Secret default/strato-dyndns")


def test_the_namespace_of_a_secret_counts_and_a_hint_tells_where_it_is():
    asks = SAMPLE + "    namespace: other\n"
    missing = one(asks, secret()).password
    assert "the Secret other/strato-dyndns-password is in no document" in missing.reason
    assert "there is one in default" in missing.reason
    moved = secret().replace("  name: strato", "  namespace: other\n  name: strato")
    assert one(asks, moved).password == Password(HIDDEN.encode())


@pytest.mark.parametrize(
    ("written", "octets"),
    [
        ("geheim\n", b"geheim"),
        ("geheim\r\n", b"geheim"),
        (" geheim ", b" geheim "),
        ("geheim\n\n", b"geheim\n"),
        (":@/#?%+&= äß", ":@/#?%+&= äß".encode()),
    ],
)
def test_one_newline_at_the_end_goes_and_nothing_else(written, octets):
    assert one(SAMPLE, secret(written)).password.reveal() == octets


def test_string_data_wins():
    both = secret("old") + "stringData:\n  password: new\n"
    assert one(SAMPLE, both).password.reveal() == b"new"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (secret().replace("password:", "passwort:"), "has no key 'password'"),
        (secret(""), "has nothing under its key"),
        (secret("\n"), "has nothing under its key"),
        (SECRET.format(data=HIDDEN + "!"), "not base64"),
        (SECRET.format(data=HIDDEN).replace("data", "stringData") + f"  other: {{a: {HIDDEN}}}\n", "text"),
        (SECRET.format(data="12345").replace("data", "stringData"), "write it in quotes"),
        (secret().replace("v1", "v2"), "expected v1 for the kind Secret"),
    ],
)
def test_a_secret_that_cannot_be_used_is_refused_and_not_quoted(text, what):
    found = faults(SAMPLE + "---\n" + text)
    assert any(what in fault for fault in found)
    assert HIDDEN not in "".join(found)
    assert "12345" not in "".join(found)


def test_other_places_of_a_password():
    assert one(domain(password="{file: /etc/x}")).password == Place("file", "/etc/x")
    assert one(domain(password="{env: X}")).password == Place("env", "X")
    assert one(domain(password="{credential: x}")).password == Place("credential", "x")


def test_other_kinds_are_passed_over_and_a_mistaken_one_is_not():
    policy = "apiVersion: dnsproxy/v1\nkind: EgressPolicy\nspec: nonsense\n"
    assert one(policy, domain(), "just text\n").fqdn == "www.example.de"
    (fault,) = faults(domain().replace("kind: Domain", "kind: Domian"))
    assert "unknown kind 'Domian'" in fault


def test_lists_are_written_out():
    items = "".join("- " + text.replace("\n", "\n  ").rstrip() + "\n" for text in (SAMPLE, secret()))
    assert one("apiVersion: v1\nkind: List\nitems:\n" + items).password == Password(HIDDEN.encode())


def test_all_faults_of_all_texts_come_at_once():
    assert len(faults(domain(interval=1), "kind: Domain\na: [", domain("b", enabled="3"))) == 3


def test_a_broken_text_of_others_breaks_nothing_of_ours():
    assert len(load([("policy.yaml", "kind: EgressPolicy\na: ["), ("d.yaml", domain())]).domains) == 1


def test_nothing_that_is_loaded_shows_the_password():
    loaded = load([("d.yaml", SAMPLE + "---\n" + secret())])
    shown = repr(loaded) + str(loaded) + repr(loaded.domains[0])
    assert HIDDEN not in shown
    assert base64.b64encode(HIDDEN.encode()).decode() not in shown


def test_the_fingerprint_follows_the_spec_and_not_the_metadata():
    prints = {one(domain(**spec)).fingerprint for spec in ({}, {"interval": 6}, {"username": "x"})}
    assert len(prints) == 3
    assert one(domain()).fingerprint == one(domain("b", fqdn="www.example.de")).fingerprint
    assert one(domain(enabled="true")).fingerprint == one(domain()).fingerprint  # a default written out
