"""What writing and reading nftables sets costs, ours beside pyroute2's: `python bench/sets.py`, as root.

Everything happens in a network namespace of its own, which goes with the process.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import subprocess
import time
from typing import TYPE_CHECKING

import uvloop
from pyroute2.nftables.main import NFTables, NFTSet, NFTSetElem

from dnsproxy.namemanager import netlink
from dnsproxy.namemanager.elements import Element, SetSpec, key_text
from dnsproxy.namemanager.nft import NftSets

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

SPEC = SetSpec("inet", "dnsproxy", "bench4", 4, ports=False, ours=True)
FULL = 100_000
LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}


def elements() -> Iterator[Element]:
    """Yield ever new elements, with a name each."""
    for number in range(1, 1 << 32):
        yield Element(SPEC, number.to_bytes(4, "big"), f"host{number}.example.com.")


def some(fresh: Iterator[Element], count: int) -> list[Element]:
    """Return the next `count` elements."""
    return [next(fresh) for _ in range(count)]


def row(what: str, seconds: list[float], count: int) -> None:
    """Print one row of the table: `seconds` are those of many transactions of `count` elements."""
    seconds.sort()
    middle, worst = seconds[len(seconds) // 2], seconds[len(seconds) * 99 // 100]
    print(f"| {what} | {count} | {middle * 1e6:,.0f} | {worst * 1e6:,.0f} | {count / middle:,.0f} |")


async def timed(times: int, step: Callable[[], Awaitable[None]]) -> list[float]:
    """Return how long each of `times` steps took, in seconds."""
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        await step()
        found.append(time.perf_counter() - begin)
    return found


async def ours(name: str) -> None:
    """Measure commits through the event loop, a large read, and how late the loop runs meanwhile."""
    sets = NftSets()
    await sets.ensure([SPEC])
    fresh = elements()
    for count, times in ((1, 5000), (100, 300), (1000, 40)):
        row(f"NftSets, {name}", await timed(times, lambda n=count: sets.commit([], some(fresh, n))), count)
    while (number := next(fresh)) and int.from_bytes(number.key, "big") < FULL:
        await sets.commit([], [number, *some(fresh, 999)])
    late: list[float] = []
    ticking = asyncio.create_task(tick(late))
    await asyncio.sleep(1)
    idle = lateness(late)
    late.clear()
    begin = time.perf_counter()
    found = await sets.read(SPEC)
    took = time.perf_counter() - begin
    ticking.cancel()
    notes.append(f"{name}: {len(found):,} elements read in {took:.2f} s")
    notes.append(f"the loop is late meanwhile by {lateness(late)}, idle by {idle} (p50 / p99 / max)")
    await sets.close()


def lateness(late: list[float]) -> str:
    """Return median, 99th percentile and maximum."""
    late.sort()
    return " / ".join(f"{late[at] * 1e3:.1f}" for at in (len(late) // 2, len(late) * 99 // 100, -1)) + " ms"


async def tick(late: list[float]) -> None:
    """Note how late the loop comes round, in seconds, about a thousand times a second."""
    while True:
        begin = time.perf_counter()
        await asyncio.sleep(0.001)
        late.append(time.perf_counter() - begin - 0.001)


def theirs() -> None:
    """Measure pyroute2's own call, blocking and without a loop of ours."""
    nft = NFTables(nfgen_family=1)
    place = NFTSet(table=SPEC.table, name=SPEC.name, key_type="ipv4_addr")
    fresh = elements()
    for count, times in ((1, 1000), (100, 100), (1000, 10)):
        seconds = []
        for _ in range(times):
            batch = some(fresh, count)
            begin = time.perf_counter()
            values = [NFTSetElem(value=key_text(element.key), comment=element.name) for element in batch]
            nft.set_elems("add", set=place, elements=values)
            seconds.append(time.perf_counter() - begin)
        row("pyroute2 `NFTables.set_elems`, blocking", seconds, count)
    nft.close()


def encoding() -> None:
    """Measure the bytes alone."""
    batch = some(elements(), 1000)
    begin = time.perf_counter()
    for _ in range(50):
        requests = netlink.add_elements(SPEC, batch, timed=False)
    made = time.perf_counter() - begin
    body = bytes(4) + requests[0].body
    begin = time.perf_counter()
    for _ in range(50):
        dict(netlink.read_elements(body))
    read = time.perf_counter() - begin
    notes.append(f"encoding {made / 50 * 1e3:.1f} us an element, reading {read / 50 * 1e3:.1f} us")


notes: list[str] = []


def main() -> None:
    """Run everything, print a table and some sentences."""
    if ctypes.CDLL(None).unshare(0x40000000):
        raise SystemExit("needs root: a network namespace of its own")
    print("| way | elements a transaction | us p50 | us p99 | elements/s |\n|---|---|---|---|---|")
    for name, factory in LOOPS.items():
        with asyncio.Runner(loop_factory=factory) as runner:
            runner.run(ours(name))
        begin = time.perf_counter()
        listed = subprocess.run(["nft", "-j", "list", "ruleset"], check=True, capture_output=True).stdout
        json.loads(listed)
        took = time.perf_counter() - begin
        subprocess.run(["nft", "flush", "set", *str(SPEC).split()], check=True)
    notes.append(f"`nft -j list` of the same set, parsed: {took:.2f} s")
    theirs()
    encoding()
    print("\n".join(["", *notes]))


if __name__ == "__main__":
    main()
