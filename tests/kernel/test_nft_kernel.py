"""NftSets against the kernel's nf_tables, judged by the `nft` command; each test in its own namespace."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import shlex
import socket
import subprocess

import pytest
import uvloop
from netns import network_namespace

from dnsproxy import names
from dnsproxy.errors import Cause, RightsError, SetError
from dnsproxy.namemanager import commands, netlink
from dnsproxy.namemanager.elements import Element, SetSpec, comment, key_of, key_text
from dnsproxy.namemanager.nft import NftSets, _Connection

pytestmark = pytest.mark.kernel

FOUR = SetSpec("inet", "dnsproxy", "github4", 4, ports=False, ours=True)
SIX = SetSpec("inet", "dnsproxy", "github6", 6, ports=False, ours=True)
FOUR_PORTS = SetSpec("inet", "dnsproxy", "ep.default.ci-1.port4", 4, ports=True, ours=True)
SIX_PORTS = SetSpec("inet", "dnsproxy", "ep.default.ci-1.port6", 6, ports=True, ours=True)
IN_IP6 = SetSpec("ip6", "dnsproxy", "github6", 6, ports=False, ours=True)
OURS = [FOUR, SIX, FOUR_PORTS, SIX_PORTS, IN_IP6]
USERS = SetSpec("inet", "fw4", "github", 4, ports=False, ours=False)

DECLARED = """
table inet dnsproxy {
  set github4 { type ipv4_addr; }
  set github6 { type ipv6_addr; }
  set ep.default.ci-1.port4 { type ipv4_addr . inet_proto . inet_service; }
  set ep.default.ci-1.port6 { type ipv6_addr . inet_proto . inet_service; }
  chain forward {
    type filter hook forward priority 0; policy accept;
    ip daddr @github4 accept
    ip daddr . meta l4proto . th dport @ep.default.ci-1.port4 accept
    ip6 daddr . meta l4proto . th dport @ep.default.ci-1.port6 accept
  }
}
table ip6 dnsproxy {
  set github6 { type ipv6_addr; }
}
"""


def nft(*arguments: str, text: str | None = None) -> str:
    """Run nft and return what it prints; an error of nft is an error of the test."""
    done = subprocess.run(["nft", *arguments], input=text, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def type_in(command: str) -> None:
    """Run a command as a person would who copies it."""
    subprocess.run(shlex.split(command), check=True)


def load(text: str) -> None:
    nft("-f", "-", text=text)


def objects(kind: str) -> list[dict]:
    return [entry[kind] for entry in json.loads(nft("-j", "list", "ruleset"))["nftables"] if kind in entry]


def listed(spec: SetSpec) -> list:
    """Return the elements of a set as nft prints them in JSON."""
    (found,) = [
        entry["set"] for entry in json.loads(nft("-j", "list", "set", *str(spec).split()))["nftables"][1:]
    ]
    return found.get("elem", [])


def keys(spec: SetSpec) -> list[str]:
    return sorted(entry["elem"]["val"] if "elem" in entry else entry for entry in listed(spec))


def four(last: int, name: str = "a.example.", spec: SetSpec = FOUR) -> Element:
    return Element(spec, bytes((192, 0, 2, last)), name)


@pytest.fixture(autouse=True)
def namespace():
    try:
        with network_namespace():
            yield
    except PermissionError:
        pytest.skip("needs root: a network namespace of its own")


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def play(request):
    """Run `scene(sets)` on one of the two loops, with sets that are closed at its end."""

    async def whole(scene):
        sets = NftSets()
        try:
            await scene(sets)
        finally:
            await sets.close()

    def run(scene):
        with asyncio.Runner(loop_factory=request.param) as runner:
            runner.run(whole(scene))

    return run


async def refusal(call) -> SetError:
    with pytest.raises(SetError) as error:
        await call
    return error.value


# --- ensure ---


def stripped(sets: list[dict]) -> list[dict]:
    return [{key: value for key, value in entry.items() if key != "handle"} for entry in sets]


def test_our_sets_are_what_nft_itself_would_have_declared(play):
    async def scene(sets):
        load(DECLARED)
        declared = stripped(objects("set"))
        nft("flush", "ruleset")
        await sets.ensure(OURS)
        assert sorted(stripped(objects("set")), key=str) == sorted(declared, key=str)

    play(scene)


def test_a_file_that_declares_our_sets_loads_before_and_after_us(play):
    async def scene(sets):
        await sets.ensure(OURS)
        await sets.commit([], [four(1)])
        load(DECLARED)
        load(DECLARED)
        await sets.ensure(OURS)
        assert keys(FOUR) == ["192.0.2.1"]
        nft("flush", "ruleset")
        load(DECLARED)
        await sets.ensure(OURS)
        await sets.commit([], [four(2)])
        assert keys(FOUR) == ["192.0.2.2"]

    play(scene)


def test_nothing_but_missing_sets_is_touched(play):
    async def scene(sets):
        load("""
            table inet dnsproxy {
              comment "mine"
              flags dormant
              set github4 { type ipv4_addr; size 100; comment "kept"; elements = { 192.0.2.9 } }
              chain c { }
            }
        """)
        before = nft("list", "set", "inet", "dnsproxy", "github4")
        await sets.ensure([FOUR, SIX])
        assert nft("list", "set", "inet", "dnsproxy", "github4") == before
        assert "flags dormant" in nft("list", "table", "inet", "dnsproxy")
        assert sorted(entry["name"] for entry in objects("set")) == ["github4", "github6"]

    play(scene)


def test_a_thousand_sets_and_more_are_made(play):
    async def scene(sets):
        many = [
            SetSpec("inet", "dnsproxy", f"ep.default.e{n}.addr4", 4, ports=False, ours=True)
            for n in range(2500)
        ]
        await sets.ensure(many)
        assert {entry["name"] for entry in objects("set")} == {spec.name for spec in many}

    play(scene)


@pytest.mark.parametrize(
    ("declaration", "words"),
    [
        ("set github { type ipv4_addr; flags interval; }", "type ipv4_addr, flags interval"),
        ("set github { type ipv4_addr; flags constant; elements = { 192.0.2.1 } }", "flags constant"),
        ("set github { type ipv6_addr; }", "type ipv6_addr"),
        ("set github { type mark; }", "type mark"),
        ("set github { type ifname; }", "type ifname"),
        ("set github { type ether_addr; }", "type ether_addr"),
        ("set github { type ipv4_addr . inet_service; }", "type ipv4_addr . inet_service"),
        ("map github { type ipv4_addr : verdict; }", "flags map"),
    ],
)
def test_a_set_that_misfits_is_named_with_what_it_is(play, declaration, words):
    async def scene(sets):
        load(f"table inet fw4 {{ {declaration}\n }}")
        error = await refusal(sets.ensure([FOUR, USERS]))
        assert error.cause is Cause.MISMATCH
        assert words in str(error)
        assert "nft add set inet fw4 github '{ type ipv4_addr; }'" in str(error)
        assert [entry["name"] for entry in objects("table")] == ["fw4"]  # nothing of ours half made

    play(scene)


def test_a_set_of_ours_that_misfits_is_not_replaced(play):
    async def scene(sets):
        load("table inet dnsproxy { set github4 { type ipv4_addr; flags interval; }\n }")
        error = await refusal(sets.ensure([FOUR]))
        assert error.cause is Cause.MISMATCH
        assert objects("set")[0]["flags"] == ["interval"]

    play(scene)


def test_sets_of_the_users_are_never_made(play):
    async def scene(sets):
        error = await refusal(sets.ensure([FOUR, USERS]))
        assert error.cause is Cause.TABLE_MISSING
        assert nft("list", "ruleset") == ""
        nft("add", "table", "inet", "fw4")
        error = await refusal(sets.ensure([FOUR, USERS]))
        assert error.cause is Cause.SET_MISSING
        assert objects("set") == []
        type_in(str(error).split("`")[1])  # what the message says to do
        await sets.ensure([FOUR, USERS])
        await sets.commit([], [four(1, spec=USERS)])
        assert keys(USERS) == ["192.0.2.1"]

    play(scene)


@pytest.mark.parametrize(
    "declaration",
    [
        "type ipv4_addr; flags timeout;",
        "type ipv4_addr; flags timeout, dynamic; timeout 1h;",
        "type ipv4_addr; size 10;",
        "type ipv4_addr; counter;",
        "typeof ip daddr;",
    ],
)
def test_other_sets_of_the_users_take_our_elements(play, declaration):
    async def scene(sets):
        load(f"table inet fw4 {{ set github {{ {declaration} }}\n }}")
        await sets.ensure([USERS])
        await sets.commit([], [four(1, spec=USERS), four(2, spec=USERS)])
        await sets.commit([four(1, spec=USERS)], [])
        assert keys(USERS) == ["192.0.2.2"]
        assert await sets.read(USERS) == {four(2).key: "a.example."}

    play(scene)


def test_in_a_set_with_a_default_timeout_our_elements_do_not_expire(play):
    async def scene(sets):
        load("table inet fw4 { set github { type ipv4_addr; flags timeout; timeout 1h; }\n }")
        await sets.ensure([USERS])
        await sets.commit([], [four(1, spec=USERS)])
        nft("add", "element", *str(USERS).split(), "{ 192.0.2.2 timeout 2h, 192.0.2.3 }")
        assert {entry["elem"]["val"] for entry in listed(USERS) if "expires" in entry["elem"]} == {
            "192.0.2.2",
            "192.0.2.3",
        }
        assert await sets.read(USERS) == {four(1).key: "a.example."}  # the others may vanish at any moment

    play(scene)


@pytest.mark.parametrize("destroys", [True, False], ids=["destroy", "before-6.3"])
def test_an_element_that_others_gave_a_timeout_stays_once_it_is_ours(play, destroys):
    async def scene(sets):
        load("table inet fw4 { set github { type ipv4_addr; flags timeout; }\n }")
        nft("add", "element", *str(USERS).split(), "{ 192.0.2.1 timeout 1h }")
        await sets.ensure([USERS])
        sets._destroys = destroys
        assert await sets.read(USERS) == {}
        await sets.commit([], [four(1, spec=USERS)])
        await sets.commit([], [four(1, spec=USERS)])
        assert await sets.read(USERS) == {four(1).key: "a.example."}
        assert listed(USERS) == [{"elem": {"val": "192.0.2.1", "comment": "a.example."}}]

    play(scene)


def test_a_set_of_the_users_may_lose_its_timeouts(play):
    async def scene(sets):
        load("table inet fw4 { set github { type ipv4_addr; flags timeout; }\n }")
        await sets.ensure([USERS])
        load("flush ruleset; table inet fw4 { set github { type ipv4_addr; }\n }")
        await sets.ensure([USERS])
        await sets.commit([], [four(1, spec=USERS)])
        assert keys(USERS) == ["192.0.2.1"]

    play(scene)


def test_a_table_that_belongs_to_another_program_is_named(play):
    async def scene(sets):
        owner = _Connection()
        owned = netlink.new_table(USERS)
        body = owned.body.replace(netlink.attribute(2, bytes(4)), netlink.attribute(2, b"\0\0\0\2"))
        owner.transact([owned._replace(body=body), netlink.new_set(USERS, 1)])
        await sets.ensure([USERS])
        error = await refusal(sets.commit([], [four(1, spec=USERS)]))
        assert error.cause is Cause.OTHER
        assert "belongs to another program" in str(error)
        owner.close()

    play(scene)


def test_a_name_that_nf_tables_cannot_hold_is_named(play):
    async def scene(sets):
        long = SetSpec("inet", "dnsproxy", "x" * 256, 4, ports=False, ours=True)
        error = await refusal(sets.ensure([long]))
        assert "name is too long" in str(error)
        assert nft("list", "ruleset") == ""

    play(scene)


# --- commit ---


def everywhere() -> list[Element]:
    """Return two elements for each of our sets."""
    found = []
    for spec in OURS:
        for last in (1, 2):
            address = (
                bytes((192, 0, 2, last))
                if spec.version == 4
                else bytes.fromhex("20010db8") + bytes(11) + bytes((last,))
            )
            key = key_of(address, 6 if last == 1 else 17, 443) if spec.ports else address
            found.append(Element(spec, key, f"host{last}.example.com."))
    return found


def test_elements_are_there_as_nft_prints_them(play):
    async def scene(sets):
        await sets.ensure(OURS)
        await sets.commit([], everywhere())
        assert [entry["elem"] for entry in listed(FOUR)] == [
            {"val": "192.0.2.1", "comment": "host1.example.com."},
            {"val": "192.0.2.2", "comment": "host2.example.com."},
        ]
        assert [entry["elem"]["val"] for entry in listed(SIX)] == ["2001:db8::1", "2001:db8::2"]
        assert [entry["elem"]["val"] for entry in listed(IN_IP6)] == ["2001:db8::1", "2001:db8::2"]
        assert sorted(entry["elem"]["val"]["concat"] for entry in listed(FOUR_PORTS)) == [
            ["192.0.2.1", "tcp", 443],
            ["192.0.2.2", "udp", 443],
        ]
        assert sorted(entry["elem"]["val"]["concat"] for entry in listed(SIX_PORTS)) == [
            ["2001:db8::1", "tcp", 443],
            ["2001:db8::2", "udp", 443],
        ]

    play(scene)


def test_the_commands_that_stand_for_a_change_make_the_same_change(play):
    async def scene(sets):
        await sets.ensure(OURS)
        await sets.commit([], everywhere())
        made = nft("list", "ruleset")
        nft("flush", "ruleset")
        for spec in OURS:
            for command in (
                commands.add_table(spec),
                commands.add_set(spec),
                commands.add_elements(spec, [element for element in everywhere() if element.spec == spec]),
            ):
                type_in(command)
        assert nft("list", "ruleset") == made
        for spec in OURS:
            gone = commands.delete_elements(
                spec, [element for element in everywhere() if element.spec == spec]
            )
            type_in(gone)
            assert listed(spec) == []

    play(scene)


@pytest.mark.parametrize("destroys", [True, False], ids=["destroy", "before-6.3"])
def test_what_is_missing_is_deleted_and_what_exists_is_added_without_error(play, destroys):
    async def scene(sets):
        await sets.ensure(OURS)
        assert sets._destroys is True, "these kernels have DESTROYSETELEM"
        sets._destroys = destroys
        await sets.commit([], [four(1), four(1), four(2)])
        await sets.commit([four(2), four(2), four(3)], [four(1, "other.example."), four(4)])
        assert await sets.read(FOUR) == {four(1).key: "a.example.", four(4).key: "a.example."}
        await sets.commit(everywhere(), [])
        assert keys(FOUR) == ["192.0.2.4"]
        assert [listed(spec) for spec in OURS[1:]] == [[], [], [], []]

    play(scene)


@pytest.mark.parametrize("destroys", [True, False], ids=["destroy", "before-6.3"])
def test_deletes_come_before_adds(play, destroys):
    async def scene(sets):
        await sets.ensure([FOUR])
        sets._destroys = destroys
        await sets.commit([], [four(1, "old.example.")])
        await sets.commit([four(1)], [four(1, "new.example.")])
        assert await sets.read(FOUR) == {four(1).key: "new.example."}

    play(scene)


def test_a_commit_of_nothing_is_no_transaction(play):
    async def scene(sets):
        await sets.ensure([FOUR])
        before = sets._connection._sequence
        await sets.commit([], [])
        assert sets._connection._sequence == before

    play(scene)


def test_a_refused_commit_changes_nothing(play):
    async def scene(sets):
        await sets.ensure([FOUR, SIX])
        await sets.commit([], [four(1)])
        nft("delete", "set", "inet", "dnsproxy", "github6")
        error = await refusal(sets.commit([four(1)], [four(2), Element(SIX, bytes(16), "b.example.")]))
        assert error.cause is Cause.SET_MISSING
        assert "inet dnsproxy github6" in str(error)
        assert keys(FOUR) == ["192.0.2.1"]
        nft("flush", "ruleset")
        error = await refusal(sets.commit([four(1)], []))
        assert error.cause is Cause.TABLE_MISSING
        await sets.ensure([FOUR, SIX])
        await sets.commit([], [four(2)])
        assert keys(FOUR) == ["192.0.2.2"]

    play(scene)


def test_a_set_that_was_replaced_by_another_kind_is_named(play):
    async def scene(sets):
        await sets.ensure([FOUR])
        load("flush ruleset; table inet dnsproxy { set github4 { type ipv6_addr; }\n }")
        error = await refusal(sets.commit([], [four(1)]))
        assert error.cause is Cause.MISMATCH

    play(scene)


def test_a_full_set_says_its_size_and_keeps_what_it_has(play):
    async def scene(sets):
        load("table inet fw4 { set github { type ipv4_addr; size 2; }\n }")
        await sets.ensure([USERS])
        await sets.commit([], [four(1, spec=USERS), four(2, spec=USERS)])
        error = await refusal(sets.commit([four(1, spec=USERS)], [four(n, spec=USERS) for n in (3, 4, 5)]))
        assert error.cause is Cause.FULL
        assert "set inet fw4 github is full (size 2)" in str(error)
        assert keys(USERS) == ["192.0.2.1", "192.0.2.2"]
        await sets.commit([], [four(1, spec=USERS)])

    play(scene)


def longest(count: int) -> list[Element]:
    return [Element(SIX_PORTS, key_of(n.to_bytes(16, "big"), 6, 443), "x" * 127) for n in range(count)]


@pytest.mark.parametrize("destroys", [True, False], ids=["destroy", "before-6.3"])
def test_a_thousand_of_the_longest_elements_go_and_come_in_one_transaction(play, destroys):
    async def scene(sets):
        await sets.ensure([SIX_PORTS])
        sets._destroys = destroys
        without_force = 212_992  # net.core.wmem_max: what there is without CAP_NET_ADMIN over the machine
        sets._connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, without_force)
        await sets.commit([], longest(1000))
        await sets.commit(longest(1000), longest(1000))
        assert set(await sets.read(SIX_PORTS)) == {element.key for element in longest(1000)}

    play(scene)


def test_more_than_a_transaction_holds_is_said_before_anything_is_sent(play):
    async def scene(sets):
        await sets.ensure([SIX_PORTS])
        with pytest.raises(ValueError, match="commit less at once"):
            await sets.commit([], longest(30_000))
        assert listed(SIX_PORTS) == []

    play(scene)


def test_sequence_numbers_go_round(play):
    async def scene(sets):
        await sets.ensure([FOUR])
        sets._connection._sequence = 0xFFFFFFFE
        await sets.commit([], [four(1)])
        sets._connection._sequence = 0xFFFFFFFF
        await sets.commit([], [four(2)])
        assert keys(FOUR) == ["192.0.2.1", "192.0.2.2"]
        sets._connection._sequence = 0xFFFFFFFF
        missing = SetSpec("inet", "dnsproxy", "missing4", 4, ports=False, ours=True)
        assert (await refusal(sets.commit([], [four(3, spec=missing)]))).cause is Cause.SET_MISSING

    play(scene)


def test_seventy_thousand_transactions_leave_nothing_behind():
    connection = _Connection()
    connection.transact([netlink.new_table(FOUR), netlink.new_set(FOUR, 1)])
    for n in range(70_000):
        element = [Element(FOUR, (n % 100).to_bytes(4, "big"), "a.example.")]
        connection.transact(netlink.add_elements(FOUR, element, timed=False))
    assert len(listed(FOUR)) == 100
    with pytest.raises(BlockingIOError):
        connection._socket.recv(65536)
    connection.close()


def test_any_name_as_comment_survives_saving_and_loading_the_ruleset(play):
    async def scene(sets):
        await sets.ensure([FOUR])
        evil = [b'a" } } flush ruleset; "', b"it's $x @y \\", b"\xff\x00\n", b"${z}`", b"ex.ample"]
        elements = [
            four(n, names.to_text(names.from_labels([label, b"example"]))) for n, label in enumerate(evil)
        ]
        await sets.commit([], elements)
        saved = nft("list", "ruleset")
        nft("flush", "ruleset")
        load(saved)
        assert await sets.read(FOUR) == {element.key: comment(element.name) for element in elements}

    play(scene)


def test_a_right_that_is_lost_later_is_noticed(play):
    async def scene(sets):
        await sets.ensure([FOUR])
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)
        dropped = sets._worker.submit(ctypes.CDLL(None).capset, header, (ctypes.c_uint32 * 6)())
        assert dropped.result() == 0
        for call in (sets.commit([], [four(1)]), sets.read(FOUR), sets.ensure([FOUR, SIX])):
            with pytest.raises(RightsError, match="CAP_NET_ADMIN"):
                await call

    play(scene)


def test_closing_leaves_the_sets(play):
    async def scene(sets):
        await sets.ensure([FOUR])
        await sets.commit([], [four(1)])

    play(scene)
    assert keys(FOUR) == ["192.0.2.1"]


# --- read ---


def many(count: int) -> list[Element]:
    return [Element(FOUR, n.to_bytes(4, "big"), f"host{n}.example.com.") for n in range(1, count + 1)]


def test_all_of_a_set_is_read_over_many_messages(play):
    async def scene(sets):
        await sets.ensure([FOUR])
        for at in range(0, 5000, 1000):
            await sets.commit([], many(5000)[at : at + 1000])
        assert await sets.read(FOUR) == {element.key: element.name for element in many(5000)}
        assert len(listed(FOUR)) == 5000

    play(scene)


def test_elements_of_others_are_read_with_their_comments_or_none(play):
    async def scene(sets):
        await sets.ensure([FOUR])
        nft("add", "element", *str(FOUR).split(), '{ 192.0.2.1 comment "by hand", 192.0.2.2 }')
        assert await sets.read(FOUR) == {four(1).key: "by hand", four(2).key: ""}

    play(scene)


def test_reading_what_is_missing_says_which(play):
    async def scene(sets):
        assert (await refusal(sets.read(FOUR))).cause is Cause.TABLE_MISSING
        nft("add", "table", "inet", "dnsproxy")
        assert (await refusal(sets.read(FOUR))).cause is Cause.SET_MISSING

    play(scene)


def disturb(sets: NftSets, times: int) -> list[int]:
    """Let somebody replace a listed element during the first dumps; return the messages of each dump."""
    dump = sets._connection.dump
    begun: list[int] = []

    def disturbed(request, take):
        begun.append(0)

        def taking(body):
            take(body)
            begun[-1] += 1
            if begun[-1] == 1 and len(begun) <= times:
                old, new = key_text(next(netlink.read_elements(body))[0]), f"192.0.2.{len(begun)}"
                load(f"delete element {FOUR} {{ {old} }}; add element {FOUR} {{ {new} }}")

        return dump(request, taking)

    sets._connection.dump = disturbed
    return begun


@pytest.mark.parametrize(("times", "dumps"), [(0, 1), (1, 2), (1000, 5)], ids=["never", "once", "always"])
def test_a_dump_that_a_change_interrupts_is_repeated_but_not_for_ever(play, times, dumps):
    async def scene(sets):
        await sets.ensure([FOUR])
        for at in range(0, 3000, 1000):
            await sets.commit([], many(3000)[at : at + 1000])
        begun = disturb(sets, times)
        found = await sets.read(FOUR)
        assert len(begun) == dumps
        assert min(begun) > 1, "the dump is to have several messages"
        if times < 2:
            assert {key_text(key) for key in found} == set(keys(FOUR))

    play(scene)


# --- foreign_change ---


def destroy_by_another_program() -> None:
    other = _Connection()
    other.transact(netlink.delete_elements(FOUR, [four(1)], destroy=True, timed=False))
    other.close()


def load_again() -> None:
    load(DECLARED)


FOREIGN = {
    "flush ruleset": lambda: nft("flush", "ruleset"),
    "delete table": lambda: nft("delete", "table", "inet", "dnsproxy"),
    "delete set": lambda: nft("delete", "set", "inet", "dnsproxy", "github4"),
    "flush set": lambda: nft("flush", "set", "inet", "dnsproxy", "github4"),
    "delete element": lambda: nft("delete", "element", "inet", "dnsproxy", "github4", "{ 192.0.2.1 }"),
    "add element": lambda: nft("add", "element", "inet", "dnsproxy", "github4", "{ 192.0.2.7 }"),
    "destroy element": destroy_by_another_program,
}


@pytest.mark.parametrize("change", FOREIGN.values(), ids=FOREIGN.keys())
def test_a_change_by_others_is_noticed_once(play, change):
    async def scene(sets):
        await sets.ensure([FOUR])
        await sets.commit([], [four(1)])
        waiting = asyncio.ensure_future(sets.foreign_change())
        await asyncio.sleep(0)
        change()
        await waiting
        assert not noticed(sets)

    play(scene)


def test_a_change_that_nobody_waited_for_is_not_lost(play):
    async def scene(sets):
        await sets.ensure([FOUR])
        nft("flush", "ruleset")
        await sets.foreign_change()
        await sets.ensure([FOUR])
        nft("flush", "ruleset")
        await sets.foreign_change()

    play(scene)


def test_a_set_of_the_users_that_appears_is_noticed(play):
    async def scene(sets):
        assert (await refusal(sets.ensure([USERS]))).cause is Cause.TABLE_MISSING
        load("table inet fw4 { set github { type ipv4_addr; }\n }")
        await sets.foreign_change()
        await sets.ensure([USERS])

    play(scene)


def noticed(sets: NftSets) -> bool:
    """Tell whether the events that the kernel has queued by now are a foreign change; forget it.

    The kernel queues the events of a transaction before it answers, so there is nothing to wait for.
    """
    sets._read_events()
    found = sets._changed.is_set()
    sets._changed.clear()
    return found


def test_our_own_changes_are_not_foreign(play):
    async def scene(sets):
        await sets.ensure(OURS)
        await sets.commit([], everywhere())
        for at in range(0, 20_000, 1000):  # more events than the socket could hold
            await sets.commit([], many(20_000)[at : at + 1000])
        await sets.commit(everywhere(), [])
        with pytest.raises(BlockingIOError):
            sets._events.recv(65536)
        assert not noticed(sets)
        nft("flush", "set", "inet", "dnsproxy", "github6")  # without elements: changes nothing
        assert not noticed(sets)
        nft("add", "element", "inet", "dnsproxy", "github6", "{ ::1 }")
        assert noticed(sets)

    play(scene)


def test_changes_elsewhere_are_not_ours_to_notice(play):
    async def scene(sets):
        await sets.ensure([FOUR])
        load("""
            table inet other { set github4 { type ipv4_addr; elements = { 192.0.2.1 } }\n }
            table ip dnsproxy { set github4 { type ipv4_addr; elements = { 192.0.2.1 } }\n }
            table inet dnsproxy {
              set mine { type ipv4_addr; elements = { 192.0.2.1 } }
              chain c { accept; }
            }
        """)
        nft("delete", "table", "inet", "other")
        nft("delete", "table", "ip", "dnsproxy")
        nft("flush", "set", "inet", "dnsproxy", "mine")
        nft("flush", "chain", "inet", "dnsproxy", "c")
        assert not noticed(sets)

    play(scene)


def test_lost_events_count_as_a_change(play):
    async def scene(sets):
        await sets.ensure([FOUR])
        sets._events.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        other = _Connection()
        other.transact([netlink.new_set(SIX, 1)])
        for n in range(100):
            other.transact(
                netlink.add_elements(SIX, [Element(SIX, n.to_bytes(16, "big"), "a.")], timed=False)
            )
        other.close()
        await sets.foreign_change()

    play(scene)


def test_a_lost_answer_is_an_error_and_the_next_call_works():
    connection = _Connection()
    connection.transact([netlink.new_table(FOUR), netlink.new_set(FOUR, 1)])
    connection._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
    bad = [netlink.new_set(FOUR, n)._replace(body=b"") for n in range(100)]
    with pytest.raises(Exception, match=str(errno.ENOBUFS)):
        connection.transact(bad)
    connection.transact(netlink.add_elements(FOUR, [four(1)], timed=False))
    assert keys(FOUR) == ["192.0.2.1"]
    connection.close()
