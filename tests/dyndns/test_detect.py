"""Finding addresses with real sources of every kind on loopback. What answers amount to: test_agreement."""

from __future__ import annotations

import asyncio
from ipaddress import ip_network

import pytest
from web_server import SILENCE, reply, serving

from dnsproxy.addresses import from_text
from dnsproxy.dyndns import detect
from dnsproxy.dyndns.client import Limits
from dnsproxy.dyndns.detect import BUILT_IN, Detector
from dnsproxy.dyndns.outcomes import SOURCE, Found, Known, NotManaged, Search, Unavailable, Wanted, Why
from dnsproxy.dyndns.sources import resolvers

A, B = from_text("93.184.216.34"), from_text("8.8.8.8")
SIX = from_text("2a01:238:1:2:aaaa:bbbb:cccc:dddd")
QUICK = Limits(5.0, 5.0)


def says(**bodies):
    """Answer by path: /a with what `a` says."""

    def answer(seen):
        body = bodies[seen.target.strip("/")]
        return body if body is SILENCE or isinstance(body, bytes) else reply(200, body)

    return answer


def urls(web, names):
    return tuple(f"http://127.0.0.1:{web.port}/{name}" for name in names)


def only4(sources, known=None, **more):
    return Search(Wanted(tuple(sources), known=known), None, **more)


async def test_two_services_agree_and_ipv6_is_not_managed():
    async with serving(says(a="93.184.216.34\n", b="93.184.216.34")) as web:
        sources = urls(web, "ab")
        assert await Detector(QUICK).find(only4(sources)) == Found(Known(A, sources), NotManaged())


async def test_nothing_is_asked_for_what_is_not_managed():
    found = await Detector(QUICK, built_in={}).find(Search(None, None))
    assert found == Found(NotManaged(), NotManaged())


async def test_one_family_that_fails_does_not_hold_up_the_other(tmp_path):
    path = tmp_path / "addresses"
    path.write_text("2a01:238:1:2:aaaa:bbbb:cccc:dddd")
    search = Search(
        Wanted((f"file:{path}",)), Wanted((f"file:{path}",), suffix=from_text("::1"), prefix_length=64), 1
    )
    found = await Detector(QUICK).find(search)
    assert isinstance(found.ipv4, Unavailable)
    assert (found.ipv4.why, "no addresses" in found.ipv4.reason) == (Why.FAILED, True)
    assert found.ipv6 == Known(from_text("2a01:238:1:2::1"), (f"file:{path}",))


async def test_a_source_that_failed_is_asked_last_from_then_on(monkeypatch):
    monkeypatch.setattr(detect, "FRESH", 0.0)
    async with serving(says(a=reply(503), b="93.184.216.34", c="93.184.216.34")) as web:
        detector, search = Detector(QUICK), only4(urls(web, "abc"))
        for _ in range(2):
            assert (await detector.find(search)).ipv4 == Known(A, urls(web, "bc"))
    assert sorted(seen.target for seen in web.seen[:2]) == ["/a", "/b"]
    assert sorted(seen.target for seen in web.seen[2:]) == ["/b", "/c", "/c"]


async def test_a_silent_source_is_a_failed_one():
    async with serving(says(a=SILENCE, b="93.184.216.34", c="93.184.216.34")) as web:
        found = await Detector(Limits(5.0, 0.3)).find(only4(urls(web, "abc")))
    assert found.ipv4 == Known(A, urls(web, "bc"))


async def test_many_records_that_ask_together_are_one_question():
    async with serving(says(a="93.184.216.34", b="93.184.216.34", c="8.8.8.8")) as web:
        detector = Detector(QUICK)
        searches = [only4(urls(web, "ab")), only4(urls(web, "ab"), known=B), only4(urls(web, "ba"))]
        found = await asyncio.gather(*map(detector.find, searches * 3))
        assert {each.ipv4.address for each in found} == {A}
        assert len(web.seen) == 2


async def test_an_answer_is_asked_for_again_after_a_moment(monkeypatch):
    async with serving(says(a="93.184.216.34")) as web:
        detector, search = Detector(QUICK), only4(urls(web, "a"), quorum=1)
        await detector.find(search)
        await detector.find(search)
        assert len(web.seen) == 1
        monkeypatch.setattr(detect, "FRESH", 0.0)
        web.answers = says(a="8.8.8.8")
        assert (await detector.find(search)).ipv4.address == B


async def test_a_search_that_is_cancelled_leaves_the_others_alone():
    async with serving(says(a=SILENCE)) as web:
        detector, search = Detector(QUICK), only4(urls(web, "a"), quorum=1)
        first = asyncio.ensure_future(detector.find(search))
        await web.arrived.wait()
        second = asyncio.ensure_future(detector.find(search))
        web.answers = says(a="93.184.216.34")
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert (await second).ipv4 == Known(A, urls(web, "a"))


async def test_a_carriers_nat_is_recognised_at_the_router():
    soap = (
        "<Envelope><Body><GetExternalIPAddressResponse><NewExternalIPAddress>100.64.1.2</NewExternalIPAddress>"
        "</GetExternalIPAddressResponse></Body></Envelope>"
    )
    answer = says(a="93.184.216.34", b="93.184.216.34", **{"igdupnp/control/WANIPConn1": soap})
    async with serving(answer) as web:
        box = f"fritzbox:127.0.0.1:{web.port}"
        found = await Detector(QUICK).find(only4([*urls(web, "ab"), box]))
        assert (found.cgnat, found.ipv4.why) == (True, Why.REJECTED)
        assert all(word in found.ipv4.reason for word in (box, "100.64.1.2", "CGNAT"))
        permitted = only4([box], quorum=1, allow=(ip_network("100.64.0.0/10"),))
        assert (await Detector(QUICK).find(permitted)).ipv4 == Known(from_text("100.64.1.2"), (box,))


async def test_a_resolver_without_a_network_is_a_failed_source():
    """No server is asked: the port is one that no socket can send to."""
    services = {"opendns": resolvers.Service("myip.opendns.com", {4: ("255.255.255.255",)}, port=53)}
    found = await Detector(QUICK, services=services).find(only4(["dns:opendns"], quorum=1))
    assert found.ipv4.why is Why.FAILED
    assert "dns:opendns: cannot be reached" in found.ipv4.reason


async def test_an_interface_that_is_not_there_is_a_failed_source():
    found = await Detector(QUICK).find(only4(["interface:nothing0"], quorum=1))
    assert found.ipv4.why is Why.FAILED
    assert "interface:nothing0: cannot be read" in found.ipv4.reason


@pytest.mark.parametrize("length", [4, 16])
def test_the_built_in_sources_can_lose_two_and_still_agree(length):
    sources = BUILT_IN[length]
    assert len(set(sources)) >= 6
    assert all(map(SOURCE, sources))
    assert not any(source.startswith("http:") for source in sources)
    kinds = [source.partition(":")[0] for source in sources[:4]]
    assert kinds == ["https", "dns", "https", "dns"]
