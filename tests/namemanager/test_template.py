"""The templates as text; that they do what they say is in tests/kernel/test_templates.py."""

import re
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dnsproxy import config
from dnsproxy.endpoints import HOST_LABEL, Endpoint, EndpointTable, built_in_host
from dnsproxy.errors import DnsproxyError
from dnsproxy.files import read_paths
from dnsproxy.namemanager import commands, template
from dnsproxy.namemanager.elements import VERSIONS, endpoint_set
from dnsproxy.rules.policy import load


def endpoint(name, *prefixes):
    return Endpoint("default", name, {}, tuple(ip_network(prefix) for prefix in prefixes))


ENDPOINTS = EndpointTable(
    [
        endpoint("ci-runner", "10.1.0.5", "10.1.0.16/28", "fd00::5"),
        endpoint("lab", "10.1.0.0/24", "10.2.0.0/24"),
    ],
    built_in_host(),
)
EVERY = {"default/ci-runner", "default/lab", "default/host"}


def block(text, title):
    """The lines between the braces of the last block of that title, without comments."""
    body = re.findall(rf"^\t{re.escape(title)} {{\n((?:\t\t.*\n)*)\t}}$", text, re.MULTILINE)[-1]
    return [line.strip() for line in body.splitlines() if not line.strip().startswith("#")]


def titles(text, kind):
    return set(re.findall(rf"^\t{kind} (\S+) {{$", text, re.MULTILINE))


def test_forward_finds_the_endpoint_by_the_longest_prefix():
    assert block(template.forward(ENDPOINTS, EVERY), "chain forward") == [
        "type filter hook forward priority filter; policy accept;",
        "ct state established,related accept",
        "ip saddr vmap { 10.1.0.5 : jump ep.default.ci-runner }",
        "ip saddr vmap { 10.1.0.16/28 : jump ep.default.ci-runner }",
        "ip saddr vmap { 10.1.0.0/24 : jump ep.default.lab, 10.2.0.0/24 : jump ep.default.lab }",
        "ip6 saddr vmap { fd00::5 : jump ep.default.ci-runner }",
    ]


def test_an_endpoint_may_reach_what_is_in_its_sets_and_is_refused_the_rest():
    assert block(template.forward(ENDPOINTS, EVERY), "chain ep.default.ci-runner") == [
        "ip daddr @ep.default.ci-runner.addr4 accept",
        "ip6 daddr @ep.default.ci-runner.addr6 accept",
        "ip daddr . meta l4proto . th dport @ep.default.ci-runner.port4 accept",
        "ip6 daddr . meta l4proto . th dport @ep.default.ci-runner.port6 accept",
        'meta l4proto tcp counter reject with tcp reset comment "no allowed name has led here"',
        'counter reject with icmpx admin-prohibited comment "no allowed name has led here"',
    ]


def test_an_endpoint_that_no_policy_selects_passes_and_the_text_says_so():
    text = template.forward(ENDPOINTS, {"default/ci-runner"})
    assert block(text, "chain ep.default.lab") == [
        'counter accept comment "no policy selects this endpoint, so it is not restricted"'
    ]
    assert not [title for title in titles(text, "set") if "lab" in title]


@pytest.mark.parametrize("make", [template.forward, template.output])
def test_sets_are_declared_as_the_daemon_creates_them(make):
    text = make(ENDPOINTS, EVERY, table=("inet", "other"))
    assert "table inet other {" in text
    names = ["host"] if make is template.output else ["ci-runner", "lab"]
    specs = [
        endpoint_set(("inet", "other"), f"default/{name}", version, ports=ports)
        for name in names
        for version in VERSIONS
        for ports in (False, True)
    ]
    assert titles(text, "set") == {spec.name for spec in specs}
    for spec in specs:
        assert block(text, f"set {spec.name}") == [f"type {' . '.join(commands.key_types(spec))}"]


@pytest.mark.parametrize(
    "text",
    [
        template.forward(ENDPOINTS, EVERY),
        template.output(ENDPOINTS, EVERY),
        template.redirect(ENDPOINTS, port=53),
    ],
    ids=["forward", "output", "redirect"],
)
def test_a_text_empties_its_chains_and_nothing_else(text):
    commands = [line for line in text.splitlines() if line and line[0] not in "#\t}"]
    flushed = {line.split()[-1] for line in commands if line.startswith("flush chain inet dnsproxy ")}
    assert flushed == titles(text, "chain")
    assert [line for line in commands if not line.startswith("flush chain")] == ["table inet dnsproxy {"] * 2


def test_output_lets_the_proxy_out_by_its_mark():
    marked = 'meta mark 7 accept comment "the queries of dnsproxy"'
    assert marked in block(template.output(ENDPOINTS, EVERY, mark=7), "chain output")
    assert "meta mark" not in template.output(ENDPOINTS, EVERY, mark=0)


def test_output_takes_the_hosts_own_document():
    host = Endpoint("infra", "gateway", {HOST_LABEL: ""}, ())
    text = template.output(EndpointTable([], host), {"infra/gateway"})
    assert block(text, "chain output")[-1] == "jump ep.infra.gateway"


def test_redirect_takes_the_endpoints_alone_and_the_host():
    text = template.redirect(ENDPOINTS, port=5353, mark=7)
    to_us = "meta l4proto { tcp, udp } th dport 53 redirect to :5353"
    assert block(text, "chain redirect.prerouting") == [
        "type nat hook prerouting priority dstnat; policy accept;",
        f"ip saddr {{ 10.1.0.0/24, 10.2.0.0/24 }} {to_us}",  # without overlaps, which nft would reject
        f"ip6 saddr {{ fd00::5 }} {to_us}",
    ]
    assert block(text, "chain redirect.output") == [
        "type nat hook output priority -100; policy accept;",
        'meta mark 7 accept comment "the queries of dnsproxy"',
        to_us,
    ]


def test_redirect_needs_a_mark():
    with pytest.raises(DnsproxyError, match=r"set `upstream: \{mark: 53\}`"):
        template.redirect(ENDPOINTS, port=53, mark=0)


def test_a_table_for_one_family_will_not_do():
    with pytest.raises(DnsproxyError, match="need a table for both address families, ip mine is for one"):
        template.forward(ENDPOINTS, EVERY, table=("ip", "mine"))


def test_no_endpoints_is_no_error():
    lonely = EndpointTable([], built_in_host())
    assert len(block(template.forward(lonely, EVERY), "chain forward")) == 2
    assert len(block(template.redirect(lonely, port=53), "chain redirect.prerouting")) == 1


def jump(text, address):
    """Where the forward chain leads a source address: nft's own reading, written once more."""
    for line in block(text, "chain forward")[2:]:
        family, pairs = re.fullmatch(r"(ip6?) saddr vmap { (.*) }", line).groups()
        if family != {4: "ip", 6: "ip6"}[address.version]:
            continue
        for pair in pairs.split(", "):
            prefix, target = pair.split(" : jump ")
            if address in ip_network(prefix):
                return target
    return None


small = st.tuples(st.integers(0, 15), st.integers(0, 4)).map(
    lambda drawn: ip_network((0x0A000000 | drawn[0] << 4, 32 - drawn[1] * 2), strict=False)
)


@given(st.lists(st.sets(small, min_size=1, max_size=4), max_size=6), st.integers(0, 255))
def test_forward_and_proxy_agree_on_who_is_who(claims, last):
    taken, found = set(), []
    for number, prefixes in enumerate(claims):
        mine = sorted(prefixes - taken)
        taken |= prefixes
        found.append(Endpoint("default", f"e{number}", {}, tuple(mine)))
    table = EndpointTable(found, built_in_host())
    address = ip_address(0x0A000000 | last)
    owner = table.find(address.packed)
    expected = owner and f"ep.{owner.namespace}.{owner.name}"
    assert jump(template.forward(table, set()), address) == expected


TREE = Path(__file__).parent.parent.parent
SAMPLES = {
    "forward": lambda table, keys, port: template.forward(table, keys),
    "output": lambda table, keys, port: template.output(table, keys),
    "redirect": lambda table, keys, port: template.redirect(table, port=port),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_samples_are_what_comes_of_the_files_that_they_name(name):
    shebang, note, made = re.fullmatch(
        r"(#!.*\n)(# A sample: (?:.*\n)+?)#\n((?:.*\n)+)", (TREE / f"config/nftables/{name}.nft").read_text()
    ).groups()
    assert f"`dnsproxy template {name}`" in note
    file, *documents = re.findall(r"config/[\w.]+(?:/[\w.]+)?\b", note)
    settings = config.read((TREE / file).read_text(), file)
    table, policy = load(read_paths(TREE / each for each in documents))
    governed = {endpoint.key for endpoint in table.endpoints if policy.restricts(endpoint)}
    assert shebang + made == SAMPLES[name](table, governed, settings.listen[0].port)


@pytest.mark.parametrize(
    ("listen", "told"),
    [
        ([("0.0.0.0", 53), ("::", 53)], []),
        ([("0.0.0.0", 53), ("::1", 53)], ["endpoints over IPv6"]),
        ([("10.1.0.1", 53), ("127.0.0.1", 53), ("::", 53)], []),
        ([("10.1.0.1", 53), ("::", 53)], ["this host over IPv4"]),
        ([("0.0.0.0", 5353), ("::", 53)], ["this host over IPv4", "endpoints over IPv4"]),
    ],
)
def test_whose_redirected_queries_nobody_would_answer(listen, told):
    found = list(template.uncovered(ENDPOINTS, listen, 53))
    assert [line.removeprefix("queries of ").partition(" are ")[0] for line in found] == told
