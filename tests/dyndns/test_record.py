"""One record on virtual time, against a provider and an address that do whatever they like."""

from __future__ import annotations

import asyncio
import random
from base64 import b64encode
from dataclasses import replace
from urllib.parse import quote

import pytest
import structlog
from dyndns_world import (
    OTHER,
    PASSWORD,
    V4,
    V6,
    Disk,
    World,
    domain,
    gaps,
    minutes,
    packed,
    virtual,
)

from dnsproxy.dyndns.documents import Missing, Place
from dnsproxy.dyndns.outcomes import Code, Password, Reply, Why
from dnsproxy.dyndns.plan import RULES, Kind
from dnsproxy.dyndns.record import redacted

HOUR, DAY = 60, 24 * 60  # minutes


# --- the ordinary day


@virtual
async def test_a_record_is_published_once_and_then_only_when_it_changes():
    world = World()
    async with world.running(domain()):
        await minutes(DAY)
        assert world.sent() == [V4]
        world.home.ipv4 = OTHER
        await minutes(5.1)
        assert world.sent() == [V4, OTHER]
        await minutes(DAY)
        assert world.sent() == [V4, OTHER]
    assert world.reasons() == [
        "DynDnsUpdateCompleted", "DynDnsUpdateSkipped",
        "IpAddressChanged", "DynDnsUpdateCompleted", "DynDnsUpdateSkipped",
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@virtual
async def test_the_record_is_right_within_one_interval_of_every_change(seed):
    world, chance = World(), random.Random(seed)
    async with world.running(domain(), chance=chance.random):
        await minutes(1)
        for number in range(100):
            world.home.ipv4 = f"93.184.217.{number}"
            await asyncio.sleep(300 + 2)  # the search and the request take a second
            assert world.provider.records["www.example.de"] == (world.home.ipv4,)
            await asyncio.sleep(chance.random() * chance.choice((1, 600)))
        assert len(world.sent()) == 101
        assert min(gaps(world.times())) >= 300


@virtual
async def test_both_families_go_in_one_request_ipv4_first():
    world = World()
    world.home.ipv6 = V6
    async with world.running(domain(families="[ipv6, ipv4]")):
        await minutes(1)
        world.home.ipv4 = OTHER
        await minutes(6)
    assert world.sent() == [f"{V4},{V6}", f"{OTHER},{V6}"]


@virtual
async def test_a_family_that_cannot_be_found_keeps_its_record():
    world = World()
    world.home.ipv6 = V6
    async with world.running(domain(families="[ipv4, ipv6]")):
        await minutes(1)
        world.home.ipv6 = None
        await minutes(HOUR)
        assert world.sent() == [f"{V4},{V6}"]  # nothing else changed: nothing is sent
        world.home.ipv4 = OTHER
        await minutes(6)
        assert world.sent()[1:] == [f"{OTHER},{V6}"]
        assert world.status().last_result is False
        assert "no source answered" in world.status().message
    assert world.reasons().count("RetrieveExternalIpFailed") == 1


@virtual
async def test_ipv6_alone_never_lets_the_server_guess_ipv4():
    world = World()
    world.home.ipv6 = V6
    async with world.running(domain(families="[ipv6]")):
        await minutes(6)
    assert world.sent() == [V6]


@virtual
async def test_a_fixed_address_asks_nobody():
    world = World()
    async with world.running(domain(ipAddress=OTHER)):
        await minutes(DAY)
        assert world.status().mode == "Manual"
    assert world.sent() == [OTHER]
    assert world.home.searches == 0


@virtual
async def test_a_search_is_told_what_was_accepted_last():
    world = World()
    async with world.running(domain()):
        await minutes(6)
    assert world.home.known[:2] == [(None, None), (packed(V4), None)]


# --- the address


@virtual
async def test_a_search_that_fails_is_no_change_and_no_reason_to_send():
    world = World()
    async with world.running(domain()):
        await minutes(6)
        for _ in range(10):
            world.home.ipv4 = None
            await minutes(HOUR)
            assert world.status().last_result is False
            assert world.status().ip_address == V4
            world.home.ipv4 = V4
            await minutes(HOUR)
            assert world.status().last_result is True
    assert world.sent() == [V4]
    assert world.reasons().count("RetrieveExternalIpFailed") == 10


@virtual
async def test_at_boot_without_a_network_the_first_searches_come_quickly():
    world = World()
    world.home.ipv4 = None
    async with world.running(domain()):
        await minutes(2)
        world.home.ipv4 = V4
        await minutes(2.1)
    assert world.sent() == [V4]


@virtual
async def test_each_time_that_addresses_are_lost_the_first_searches_come_quickly():
    world = World()
    async with world.running(domain(interval=60)):
        for round_ in range(3):
            await minutes(61)
            world.home.ipv4 = None
            await minutes(61 + 120)
            world.sync.look_again()
            world.home.ipv4 = V4
            await minutes(1)
            searches = world.home.searches
            world.home.ipv4 = None
            world.sync.look_again()
            await minutes(4)
            assert world.home.searches - searches == 4, round_  # at once, after 30, 60 and 120 s
            world.home.ipv4 = V4
            await minutes(61)


@virtual
async def test_a_slow_disk_makes_the_time_between_requests_longer_and_never_shorter():
    world = World()
    world.disk.delay = 40.0
    async with world.running(domain()):
        await minutes(1)
        assert world.sent() == [V4]
        world.disk.delay = 0.001
        for address in (OTHER, V4):
            world.home.ipv4 = address
            world.sync.look_again()
            await minutes(5.2)
    assert world.sent() == [V4, OTHER, V4]
    assert min(gaps(world.times())) >= 300


@pytest.mark.parametrize("why", Why)
@virtual
async def test_each_trouble_with_the_address_has_its_event(why):
    world = World()
    world.home.ipv4, world.home.why = None, why
    async with world.running(domain()):
        await minutes(DAY)
    assert world.reasons() == [why.value]
    assert world.sent() == []


@virtual
async def test_flapping_faster_than_the_spacing_costs_one_request_per_spacing_at_most():
    world = World()
    async with world.running(domain()):
        for _ in range(200):
            world.home.ipv4 = OTHER if world.home.ipv4 == V4 else V4
            world.sync.look_again()
            await minutes(0.3)
        await minutes(6)
        assert min(gaps(world.times())) >= 300
        assert world.provider.records["www.example.de"] == (world.home.ipv4,)


@virtual
async def test_an_address_that_comes_back_within_the_spacing_sends_nothing():
    world = World()
    async with world.running(domain()):
        await minutes(1)
        world.home.ipv4 = OTHER
        world.sync.look_again()
        await minutes(1)
        world.home.ipv4 = V4
        await minutes(HOUR)
    assert world.sent() == [V4]


# --- the table of replies, word by word

WORDS = [
    # code, requests in a day, seconds until the second one, phase, the event of what follows
    (Code.BADAUTH, 1, None, "halted", "DynDnsUpdateHalted"),
    (Code.DONATOR, 1, None, "halted", "DynDnsUpdateHalted"),
    (Code.YOURS, 1, None, "halted", "DynDnsUpdateHalted"),
    (Code.ACTIVE, 1, None, "halted", "DynDnsUpdateHalted"),
    (Code.NOTFQDN, 1, None, "halted", "DynDnsUpdateHalted"),
    (Code.NOHOST, 1, None, "halted", "DynDnsUpdateHalted"),
    (Code.NUMHOST, 1, None, "halted", "DynDnsUpdateHalted"),
    (Code.BADSYS, 1, None, "halted", "DynDnsUpdateHalted"),
    (Code.BADAGENT, 1, None, "halted", "DynDnsUpdateHalted"),
    (Code.NO_SERVICE, 1, None, "halted", "DynDnsUpdateHalted"),
    (Code.ABUSE, 5, 3600, "held", "DynDnsUpdateDelayed"),
    (Code.DNSERR, 7, 1800, "held", "DynDnsUpdateDelayed"),
    (Code.NINE_ONE_ONE, 7, 1800, "held", "DynDnsUpdateDelayed"),
    (Code.SERVER_ERROR, 7, 1800, "held", "DynDnsUpdateDelayed"),
    (Code.TOO_MANY, 7, 1800, "held", "DynDnsUpdateDelayed"),
    (Code.REDIRECT, 7, 1800, "held", "DynDnsUpdateDelayed"),
    (Code.UNKNOWN, 52, 300, "retrying", "DynDnsUpdateDelayed"),
    (Code.TIMEOUT, 52, 300, "retrying", "DynDnsUpdateDelayed"),
    (Code.NETWORK, 52, 300, "retrying", "DynDnsUpdateDelayed"),
    (Code.TLS, 52, 300, "retrying", "DynDnsUpdateDelayed"),
]


def test_the_table_walks_every_failure():
    assert {code for code, *_ in WORDS} == {code for code in Code if RULES[code].kind is not Kind.SUCCESS}


@pytest.mark.parametrize(("code", "requests", "second", "phase", "then"), WORDS)
@virtual
async def test_a_word(code, requests, second, phase, then):
    world = World()
    world.provider.out = code
    async with world.running(domain()):
        await minutes(DAY)
        times, shown = world.times(), world.status()
        assert len(times) == requests
        if second is not None:
            assert times[1] - times[0] == pytest.approx(second, abs=2)
        assert (shown.phase, shown.last_code, shown.held_reason) == (phase, code.value, code.value)
        assert (shown.last_result, shown.ip_address) == (False, None)
        assert shown.consecutive_failures == requests
        assert (shown.held_until is None) is (second is None)
        assert RULES[code].advice in shown.message
        assert world.reasons() == ["DynDnsUpdateFailed", then]  # once, not 52 times
        assert world.sync.updates == {("www.example.de", code.value): requests}
        world.provider.out = None
        await minutes(DAY)
        if second is not None:
            assert world.status().last_result is True
        assert len(world.times()) == requests + (second is not None)


@pytest.mark.parametrize("code", [Code.GOOD, Code.NOCHG])
@virtual
async def test_a_word_of_success(code):
    world = World()
    world.provider.records["www.example.de"] = (V4,) if code is Code.NOCHG else ()
    async with world.running(domain()):
        await minutes(DAY)
        shown = world.status()
    assert (shown.phase, shown.last_code, shown.last_result, shown.ip_address) == (
        "in-sync", code.value, True, V4
    )  # fmt: skip
    assert world.sent() == [V4]
    assert world.reasons() == ["DynDnsUpdateCompleted", "DynDnsUpdateSkipped"]


@virtual
async def test_a_server_that_stored_something_else_is_told_of_and_not_asked_again():
    world = World()
    world.provider.replies = [Reply(Code.GOOD, f"good {OTHER}", stored=(packed(OTHER),))]
    async with world.running(domain()):
        await minutes(DAY)
    assert world.sent() == [V4]
    assert world.reasons() == ["DynDnsUpdateCompleted", "DnsMismatch", "DynDnsUpdateSkipped"]


@virtual
async def test_who_says_nochg_too_often_is_told_of():
    world = World()
    async with world.running(domain()):
        for address in (OTHER, V4, OTHER):
            world.provider.records["www.example.de"] = (address,)  # somebody else is faster
            world.home.ipv4 = address
            await minutes(11)
    assert world.reasons().count("DynDnsUpdateDelayed") == 1
    assert world.events[-2].message.startswith("nochg three times")


@virtual
async def test_a_halt_ends_with_another_document_password_or_word_from_a_person():
    world = World()
    world.provider.passwords["www.example.de"] = "right"
    async with world.running(domain()):
        await minutes(DAY)
        world.home.ipv4 = OTHER  # no reason
        await minutes(DAY)
        assert len(world.times()) == 1
        world.sync.update([domain(username="me")])
        await minutes(DAY)
        assert len(world.times()) == 2
        assert world.sync.resume("www") is None
        await minutes(DAY)
        assert len(world.times()) == 3
        world.sync.update([domain(username="me", password="right")])
        await minutes(DAY)
        assert len(world.times()) == 4
        assert world.status().last_result is True
    assert world.reasons().count("DynDnsUpdateResumed") == 3
    assert world.reasons().count("DynDnsUpdateHalted") == 3


@virtual
async def test_switching_a_record_off_and_on_ends_a_halt_too():
    world = World()
    world.provider.replies = [Code.NOTFQDN]
    async with world.running(domain()):
        await minutes(HOUR)
        world.sync.update([domain(enabled="false")])
        await minutes(1)
        world.sync.update([domain()])
        await minutes(1)
        assert world.sent() == [V4, V4]


# --- passwords


@virtual
async def test_a_secret_that_comes_later_is_taken_at_once():
    world = World()
    late = replace(domain(), password=Missing("the Secret default/s is in no document"))
    async with world.running(late):
        await minutes(DAY)
        assert world.status().phase == "waiting-for-secret"
        assert "default/s" in world.status().message
        assert (world.sent(), world.home.searches, world.reasons()) == ([], 0, ["SecretMissing"])
        world.sync.update([domain()])
        await minutes(0.1)
        assert world.sent() == [V4]


@virtual
async def test_a_password_in_a_file_is_read_for_each_pass():
    world = World(keys={"PW": Missing("the variable PW is not set")})
    world.provider.passwords["www.example.de"] = "right"
    async with world.running(replace(domain(), password=Place("env", "PW"))):
        await minutes(12)
        assert world.sent() == []
        world.keys["PW"] = Password(b"wrong")
        await minutes(DAY)
        assert world.sent() == [V4]
        world.keys["PW"] = Password(b"right")
        await minutes(5.1)
        assert world.sent() == [V4, V4]
        assert world.status().last_result is True
        world.keys["PW"] = Password(b"other")  # what works is not tried again
        await minutes(DAY)
        assert world.sent() == [V4, V4]


# --- documents that change


@virtual
async def test_another_host_user_or_endpoint_is_published_though_the_address_is_the_same():
    world = World()
    async with world.running(domain()):
        await minutes(11)
        world.sync.update([replace(domain(), hostname="new.example.de", fqdn="new.example.de")])
        await minutes(0.1)
        assert world.times("new.example.de")
        world.sync.update([replace(domain(), hostname="new.example.de", username="me")])
        await minutes(6)
        assert len(world.times("new.example.de")) == 2
        assert min(gaps(world.times("new.example.de"))) >= 300


@virtual
async def test_a_host_that_goes_and_comes_keeps_its_spacing_and_what_was_accepted():
    for disk in (Disk(), None):
        world = World(disk=disk)
        async with world.running(domain()):
            await minutes(6)
            world.home.ipv4 = OTHER
            await minutes(6)
            before = world.sent()
            assert before == [V4, OTHER]
            for _ in range(20):
                world.sync.update([])
                await minutes(0.1)
                world.sync.update([domain()])
                await minutes(0.1)
            await minutes(HOUR)
            assert world.sent() == before


@virtual
async def test_a_disabled_record_has_no_timer_no_result_and_no_event():
    world = World()
    async with world.running(domain()):
        await minutes(6)
        told = len(world.events)
        world.sync.update([domain(enabled="false")])
        world.home.ipv4 = OTHER
        await minutes(DAY)
        shown = world.status()
        assert (shown.phase, shown.enabled, shown.last_result) == ("disabled", False, None)
        assert len(world.events) == told
        assert world.sent() == [V4]
        assert world.sync.force("www") == "the record is disabled"


@pytest.mark.parametrize(("code", "least"), [(Code.ABUSE, 3600), (Code.DNSERR, 1800)])
@virtual
async def test_to_disable_and_enable_a_record_ends_no_hold_that_ends_by_itself(code, least):
    world = World()
    world.provider.out = code
    async with world.running(domain()):
        await minutes(1)
        world.sync.update([domain(enabled="false")])
        await minutes(1)
        world.sync.update([domain()])
        await minutes(DAY)
        first, second, *_ = world.times()
        assert second - first >= least


@virtual
async def test_an_edited_interval_counts_at_once():
    world = World()
    async with world.running(domain(interval=10_000)):
        await minutes(1)
        slow = world.status().next_run
        world.sync.update([domain(interval=5)])
        await minutes(1)
        assert world.status().next_run < slow
        searches = world.home.searches
        await minutes(HOUR)
        assert world.home.searches - searches == pytest.approx(12, abs=1)


@virtual
async def test_what_was_looked_for_before_an_edit_is_not_published_after_it():
    world = World()
    async with world.running(domain()):
        await asyncio.sleep(0.2)  # the search is under way
        world.sync.update([domain(enabled="false")])
        await minutes(HOUR)
    assert world.sent() == []


# --- clocks


@pytest.mark.parametrize("leap", [-400 * 86_400, -3600, 3600, 400 * 86_400])
@virtual
async def test_the_wall_clock_may_leap_while_we_run_and_between_two_runs(leap):
    world = World()
    async with world.running(domain()):
        await minutes(6)
        world.wall_ahead += leap
        await minutes(HOUR)
        assert world.sent() == [V4]
        world.home.ipv4 = OTHER
        await minutes(5.1)
        assert world.sent() == [V4, OTHER]
    world.wall_ahead -= 2 * leap
    async with world.running(domain()):
        await minutes(0.1)
        world.home.ipv4 = V4
        await minutes(6)
        assert world.sent() == [V4, OTHER, V4]
        assert min(gaps(world.times())) >= 300


@virtual
async def test_after_a_suspend_one_pass_comes_soon_and_only_one():
    world = World()
    async with world.running(domain(interval=600)):
        await minutes(2)
        before = world.home.searches
        world.wall_ahead += 8 * 3600  # the machine slept, and with it the monotonic clock
        await minutes(1.1)
        assert world.home.searches == before + 1
        await minutes(30)
        assert world.home.searches == before + 1


# --- secrets


@pytest.mark.parametrize("password", [PASSWORD, "p:@/#?%+&= äb", "x" * 150, "%s %(a)s {0}"])
@virtual
async def test_no_password_is_shown_anywhere(password):
    """Even where the server sends it back, and where our own code breaks with it in hand."""
    basic = b64encode(f"www.example.de:{password}".encode()).decode()
    forms = {password, quote(password), quote(password, safe=""), basic}
    world = World()
    echoes = [Reply(Code.UNKNOWN, f"<html>{form} said {form}</html>") for form in sorted(forms)]
    world.provider.replies = [*echoes, ValueError(password), Reply(Code.BADAUTH, f"badauth {password}")]
    hooked, find = [], world.home.find

    async def broken(search):
        if world.home.searches == 2:
            world.home.searches += 1
            raise ValueError(password)
        return await find(search)

    world.home.find = broken

    async def hook(event):
        hooked.append(event)
        raise RuntimeError("hook")

    with structlog.testing.capture_logs() as logs:
        async with world.running(domain(password=password), hook=hook):
            for _ in range(40):
                await minutes(5)
                views = world.sync.views()
                produced = [
                    *views,
                    repr(
                        {
                            key: each
                            for key, each in vars(world.sync).items()
                            if key not in ("publisher", "passwords", "clock")
                        }
                    ),
                    world.disk.rows,
                    world.sync.problems(),
                ]
                produced += [shown.model_dump_json() for _, shown in views]
                text = repr(produced)
                assert not [form for form in forms if form in text]
    produced = repr([logs, world.events, [event.row() for event in world.events], hooked])
    assert "DynDnsUpdateHalted" in produced
    assert "a pass broke off" in produced
    assert not [form for form in forms if form in produced]


def test_a_server_that_sends_the_password_back_is_not_quoted():
    password = Password("pä ss/word".encode())
    for form in ("pä ss/word", "p%C3%A4%20ss/word", "p%C3%A4%20ss%2Fword"):
        assert redacted(f"no: {form}!", "me", password) == "no: ***!"
    assert redacted("nothing", "me", Password(b"")) == "nothing"
