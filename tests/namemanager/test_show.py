from __future__ import annotations

import asyncio

import pytest

from dnsproxy.errors import Cause, SetError
from dnsproxy.namemanager.elements import Element, SetSpec
from dnsproxy.namemanager.show import ShowSets

OURS = SetSpec("inet", "dnsproxy", "github4", 4, ports=False, ours=True)
OURS6 = SetSpec("inet", "dnsproxy", "github6", 6, ports=False, ours=True)
USERS = SetSpec("inet", "fw4", "github", 4, ports=False, ours=False)


def element(last: int, spec: SetSpec = OURS, name: str = "a.example.") -> Element:
    return Element(spec, bytes((192, 0, 2, last)), name)


@pytest.fixture
def shown() -> list[str]:
    return []


@pytest.fixture
def sets(shown) -> ShowSets:
    return ShowSets(shown.append)


async def test_each_set_of_ours_is_made_once_and_its_table_before_it(sets, shown):
    await sets.ensure([OURS])
    await sets.ensure([OURS, OURS6, USERS])
    assert shown == [
        "nft add table inet dnsproxy",
        "nft add set inet dnsproxy github4 '{ type ipv4_addr; }'",
        "nft add set inet dnsproxy github6 '{ type ipv6_addr; }'",
    ]


async def test_a_set_of_the_users_is_filled_but_never_made(sets, shown):
    await sets.ensure([USERS])
    await sets.commit([], [element(1, USERS)])
    assert shown == ["""nft add element inet fw4 github '{ 192.0.2.1 comment "a.example." }'"""]


async def test_a_commit_is_shown_set_by_set_deletes_first(sets, shown):
    await sets.ensure([OURS, USERS])
    await sets.commit([], [element(1), element(2)])
    shown.clear()
    await sets.commit([element(1)], [element(3), element(3, USERS)])
    assert shown == [
        "nft delete element inet dnsproxy github4 '{ 192.0.2.1 }'",
        """nft add element inet dnsproxy github4 '{ 192.0.2.3 comment "a.example." }'""",
        """nft add element inet fw4 github '{ 192.0.2.3 comment "a.example." }'""",
    ]


async def test_an_element_that_goes_and_comes_is_shown_going_and_coming(sets, shown):
    await sets.ensure([OURS])
    await sets.commit([], [element(1)])
    shown.clear()
    await sets.commit([element(1)], [element(1, name="b.example.")])
    assert shown == [
        "nft delete element inet dnsproxy github4 '{ 192.0.2.1 }'",
        """nft add element inet dnsproxy github4 '{ 192.0.2.1 comment "b.example." }'""",
    ]


async def test_what_changes_nothing_is_not_shown(sets, shown):
    await sets.ensure([OURS])
    await sets.commit([], [element(1)])
    shown.clear()
    await sets.commit([element(2)], [element(1, name="other.example.")])
    assert shown == []
    assert await sets.read(OURS) == {element(1).key: "a.example."}


async def test_what_was_committed_can_be_read(sets):
    await sets.ensure([OURS])
    await sets.commit([], [element(1), element(1), element(2, name="x" * 200)])
    found = await sets.read(OURS)
    assert set(found) == {element(1).key, element(2).key}
    assert "..." in found[element(2).key]
    await sets.commit([element(1)], [])
    assert set(await sets.read(OURS)) == {element(2).key}


async def test_a_set_that_was_never_asked_for_is_an_error_and_changes_nothing(sets, shown):
    await sets.ensure([OURS])
    shown.clear()
    with pytest.raises(SetError) as error:
        await sets.commit([], [element(1), element(1, USERS)])
    assert error.value.cause is Cause.SET_MISSING
    assert shown == []
    assert await sets.read(OURS) == {}
    with pytest.raises(SetError):
        await sets.read(USERS)


async def test_nobody_else_changes_these_sets(sets):
    waiting = asyncio.ensure_future(sets.foreign_change())
    await sets.ensure([OURS])
    await sets.commit([], [element(1)])
    await asyncio.sleep(0)
    assert not waiting.done()
    waiting.cancel()
    await sets.close()
