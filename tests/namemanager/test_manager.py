"""The single writer, on virtual time: what waits, what is written together, what ends how."""

from __future__ import annotations

import asyncio
import json
from functools import wraps

import pytest
from fakes import FakeSets, Writer, run_virtual, until
from structlog.testing import capture_logs

from dnsproxy.addresses import from_text as address
from dnsproxy.cache.zombies import Gone
from dnsproxy.errors import Cause, KernelError, RightsError, SetError
from dnsproxy.namemanager import manager as manager_module
from dnsproxy.namemanager import plan as plan_module
from dnsproxy.namemanager import room as room_module
from dnsproxy.namemanager.elements import SetSpec, key_of
from dnsproxy.names import from_text

POLICY = """
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: ci, labels: {app: ci}}
spec: {addresses: [192.0.2.10]}
---
apiVersion: dnsproxy/v1
kind: Endpoint
metadata: {name: web, labels: {app: web}}
spec: {addresses: [192.0.2.20]}
---
apiVersion: dnsproxy/v1
kind: EgressPolicy
metadata: {name: ci}
spec:
  endpointSelector: {}
  allow:
  - {pattern: "*.example.com", ports: [443/TCP]}
  - {name: hub.example.org, ports: [443/TCP], set: "4#inet#fw4#hub"}
  resolve: ["*.lookup.test"]
"""
LATER = POLICY.replace("  resolve:", '  - {pattern: "*.lookup.test", ports: [80/TCP]}\n  resolve:')
ONE, TWO, THREE = (address(f"93.184.216.{number}") for number in (34, 35, 36))
PORT4 = SetSpec("inet", "dnsproxy", "ep.default.ci.port4", 4, ports=True, ours=True)
WEB4 = SetSpec("inet", "dnsproxy", "ep.default.web.port4", 4, ports=True, ours=True)
HUB = SetSpec("inet", "fw4", "hub", 4, ports=False, ours=False)


def virtual(test):
    """Run an async test on virtual time."""

    @wraps(test)
    def run(*arguments, **keywords):
        return run_virtual(test(*arguments, **keywords))

    return run


def milliseconds(number):
    async def delay():
        await asyncio.sleep(number / 1000)

    return delay


def keys(*addresses, port=443):
    return {key_of(each, 6, port) for each in addresses}


def fresh(count, first=0):
    return [bytes((93, 1, number >> 8, number & 255)) for number in range(first, first + count)]


async def settled(writer):
    """Run until the first repair is done."""
    async with writer.running():
        pass


def sets_with_hub(**settings):
    return FakeSets(kernel={HUB: {}}, **settings)


# Holding


@virtual
async def test_an_answer_leaves_when_the_kernel_has_acknowledged_and_not_before():
    async with Writer(POLICY, sets_with_hub(delay=milliseconds(5))).running() as writer:
        number = writer.ask("www.example.com", ONE)
        await asyncio.sleep(0.008)
        assert writer.sets.has(writer.elements("www.example.com", ONE))
        assert writer.answers == {}
        await asyncio.sleep(0.004)
        answer = writer.answers[number]
        assert answer.wire == b"answer"
        cause, held = writer.ends[number]
        assert cause == ""
        assert held == pytest.approx(0.010)
        assert (writer.manager.holds, writer.manager.released) == (1, 1)


@virtual
async def test_a_second_answer_with_the_same_address_waits_for_the_write_in_flight():
    async with Writer(POLICY, sets_with_hub(delay=milliseconds(5))).running() as writer:
        writer.ask("www.example.com", ONE)
        await asyncio.sleep(0.007)
        second = writer.ask("www.example.com", ONE)
        assert second not in writer.answers
        await asyncio.sleep(0.1)
        assert writer.unapplied() == []
        assert writer.answers[second].held
        third = writer.ask("www.example.com", ONE)
        assert not writer.answers[third].held
        assert len(writer.sets.transactions) == 1


@virtual
async def test_what_arrives_during_a_batch_is_the_next_batch():
    async with Writer(POLICY, sets_with_hub(delay=milliseconds(5))).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.001)
        for number, one in enumerate(fresh(50)):
            writer.ask(f"n{number}.example.com", one, who="web" if number % 2 else "ci")
        await asyncio.sleep(0.03)
        assert [len(adds) for _, adds in writer.sets.transactions] == [1, 50]
        assert writer.manager.batches == 2
        assert writer.manager.elements == 51
        assert len(writer.answers) == 51


@virtual
async def test_a_batch_is_cut_into_transactions_of_a_thousand():
    async with Writer(POLICY, sets_with_hub()).running() as writer:
        for number in range(5):
            writer.ask(f"many{number}.example.com", *fresh(500, 500 * number))
        await asyncio.sleep(0.05)
        assert [len(adds) for _, adds in writer.sets.transactions] == [1000, 1000, 500]
        assert writer.unapplied() == []
        assert len(writer.answers) == 5


@virtual
async def test_what_a_waiter_waits_for_is_added_even_if_its_name_was_dropped_meanwhile():
    async with Writer(POLICY, sets_with_hub(delay=milliseconds(5))).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.001)
        dropped = writer.ask("b.example.com", TWO)
        writer.caches.of("default/ci").expire(2000.0, [from_text("b.example.com")])
        await asyncio.sleep(0.03)
        assert writer.answers[dropped].applied
        writer.manager.foreign_change()
        await asyncio.sleep(1)
        assert set(writer.sets.kernel[PORT4]) == keys(ONE)


@virtual
async def test_a_client_that_does_not_wait_takes_no_write_with_it():
    sets = sets_with_hub(stuck=asyncio.Event())
    sets.stuck.set()
    async with Writer(POLICY, sets).running() as writer:
        sets.stuck.clear()
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.001)
        gone = writer.ask("b.example.com", TWO)
        await asyncio.sleep(0.2)
        assert writer.answers[gone].wire == b"refusal"
        sets.stuck.set()
        await asyncio.sleep(0.01)
        assert set(sets.kernel[PORT4]) == keys(ONE, TWO)


# Deadlines


@pytest.mark.parametrize(("release", "wire"), [(False, b"refusal"), (True, b"answer")])
@virtual
async def test_a_hold_ends_on_time_while_a_transaction_hangs(release, wire):
    sets = sets_with_hub(stuck=asyncio.Event())
    sets.stuck.set()
    async with Writer(POLICY, sets, release=release).running() as writer:
        sets.stuck.clear()
        first = writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.05)
        second = writer.ask("b.example.com", TWO)
        await asyncio.sleep(0.2)
        assert [writer.answers[each].wire for each in (first, second)] == [wire, wire]
        assert writer.ends[first] == ("hold timeout", pytest.approx(0.1))
        assert writer.ends[second] == ("hold timeout", pytest.approx(0.1))
        assert writer.manager.timeouts == 2
        assert writer.manager.released == 0


@virtual
async def test_an_earlier_deadline_comes_first_whoever_came_first():
    sets = sets_with_hub(stuck=asyncio.Event())
    sets.stuck.set()
    async with Writer(POLICY, sets).running() as writer:
        sets.stuck.clear()
        writer.hold = 1.0
        late = writer.ask("a.example.com", ONE)
        writer.hold = 0.1
        early = writer.ask("b.example.com", TWO)
        await asyncio.sleep(0.5)
        assert early in writer.answers
        assert late not in writer.answers
        await asyncio.sleep(0.6)
        assert writer.ends[late] == ("hold timeout", pytest.approx(1.0))


@virtual
async def test_a_transaction_that_never_ends_counts_as_failed_and_leads_to_a_repair():
    sets = sets_with_hub(stuck=asyncio.Event())
    sets.stuck.set()
    async with Writer(POLICY, sets).running() as writer:
        sets.stuck.clear()
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(manager_module.PATIENCE + 0.01)
        assert writer.manager.failures == 1
        assert writer.manager.status()["state"] == "not enforcing"
        assert "no answer from the kernel" in writer.manager.problem
        sets.stuck.set()
        await asyncio.sleep(6)
        assert writer.manager.status()["state"] == "enforcing"
        assert set(sets.kernel[PORT4]) == keys(ONE)


# Trouble with single sets


@virtual
async def test_a_full_set_fails_alone_and_its_holds_end_at_once():
    sets = sets_with_hub(sizes={PORT4: 1}, delay=milliseconds(1))
    async with Writer(POLICY, sets).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.01)
        fine = [writer.ask("b.example.com", one, who="web") for one in fresh(20)]
        full = writer.ask("b.example.com", TWO)
        await asyncio.sleep(0.02)
        assert writer.answers[full].wire == b"refusal"
        assert writer.ends[full][0] == "set refused"
        assert all(writer.answers[each].applied for each in fine)
        assert writer.manager.status()["failing"] == {str(PORT4): f"set {PORT4} is full"}
        assert writer.manager.status()["state"] == "enforcing"
        assert (writer.manager.refused, writer.manager.timeouts) == (1, 0)
        again = writer.ask("c.example.com", THREE)
        other = writer.ask("c.example.com", THREE, who="web")
        await asyncio.sleep(0.02)
        assert writer.answers[again].wire == b"refusal"
        assert writer.answers[other].applied


@virtual
async def test_a_full_set_that_gets_room_is_filled_again_by_itself():
    sets = sets_with_hub(sizes={PORT4: 1})
    async with Writer(POLICY, sets).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.01)
        writer.ask("b.example.com", TWO)
        await asyncio.sleep(1)
        assert len(sets.kernel[PORT4]) == 1
        sets.sizes[PORT4] = 10
        with capture_logs() as lines:
            await asyncio.sleep(61)
        assert set(sets.kernel[PORT4]) == keys(ONE, TWO)
        assert writer.manager.failing == {}
        assert [line["event"] for line in lines] == ["a set is enforced again"]


@virtual
async def test_sets_that_misfit_at_the_start_leave_the_others_working():
    error = SetError(Cause.MISMATCH, f"set {PORT4} has type ipv4_addr")
    sets = sets_with_hub(unfit={PORT4: error})
    with capture_logs() as lines:
        async with Writer(POLICY, sets).running() as writer:
            bad, good = writer.ask("a.example.com", ONE), writer.ask("a.example.com", ONE, who="web")
            await asyncio.sleep(30)
            assert writer.answers[bad].wire == b"refusal"
            assert writer.answers[good].applied
            assert writer.manager.status()["failing"] == {str(PORT4): str(error)}
            assert sets.kernel.keys() == {*writer.plan.specs()} - {PORT4}
            assert writer.manager.repairs < 15
    assert [line["event"] for line in lines] == ["a set is not enforced"]


@virtual
async def test_a_set_of_the_users_may_come_later():
    sets = FakeSets()
    async with Writer(POLICY, sets).running() as writer:
        early = writer.ask("hub.example.org", ONE)
        other = writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.05)
        assert writer.ends[early][0] == "set refused"
        assert writer.answers[other].applied
        assert list(writer.manager.status()["failing"]) == [str(HUB)]
        sets.kernel[HUB] = {}
        sets.changed.set()
        await asyncio.sleep(1)
        assert set(sets.kernel[HUB]) == {ONE}
        assert writer.manager.failing == {}
        late = writer.ask("hub.example.org", TWO)
        await asyncio.sleep(0.05)
        assert writer.answers[late].applied


@virtual
async def test_what_was_in_a_set_of_the_users_that_is_gone_does_not_count():
    sets = sets_with_hub()
    async with Writer(POLICY, sets).running() as writer:
        writer.ask("hub.example.org", ONE)
        await asyncio.sleep(1)
        del sets.kernel[HUB]  # and nobody tells
        await asyncio.sleep(61)
        assert writer.manager.failures == writer.manager.repairs - 1  # it is not even asked to delete there
        number = writer.ask("hub.example.org", ONE)
        await asyncio.sleep(0.01)
        assert writer.ends[number][0] == "set refused"


@virtual
async def test_a_missing_set_of_the_users_makes_no_storm_of_repairs():
    async with Writer(POLICY, FakeSets()).running() as writer:
        await asyncio.sleep(60)
        before = writer.manager.repairs
        for one in fresh(100):
            writer.ask("hub.example.org", one)
            await asyncio.sleep(0.1)
        assert writer.manager.repairs <= before + 2
        assert len(writer.answers) == 100


@virtual
async def test_a_refusal_without_a_reason_is_tried_once_more():
    errors = [SetError(Cause.OTHER, "lost")]
    sets = sets_with_hub(trouble=lambda deletes, adds: errors.pop() if errors and adds else None)
    async with Writer(POLICY, sets).running() as writer:
        number = writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.05)
        assert writer.answers[number].applied
        assert writer.manager.failures == 0
        errors += [SetError(Cause.OTHER, "lost")] * 2
        number = writer.ask("b.example.com", TWO)
        await asyncio.sleep(0.05)
        assert writer.ends[number][0] == "set refused"
        assert writer.manager.failures == 1


# Trouble with everything


@virtual
async def test_missing_rights_are_visible_and_tried_again():
    sets = sets_with_hub()
    async with Writer(POLICY, sets).running() as writer:
        sets.rights = False
        with capture_logs() as lines:
            number = writer.ask("a.example.com", ONE)
            await asyncio.sleep(30)
        assert writer.answers[number].wire == b"refusal"
        status = writer.manager.status()
        assert status["state"] == "not enforcing"
        assert "CAP_NET_ADMIN" in status["problem"]
        assert writer.manager.failures < 20
        assert [line["event"] for line in lines] == ["not enforcing, trying again"]
        sets.rights = True
        await asyncio.sleep(11)
        assert writer.manager.status()["state"] == "enforcing"
        assert writer.manager.status()["problem"] is None
        assert set(sets.kernel[PORT4]) == keys(ONE)


@pytest.mark.parametrize("error", [KernelError("no nf_tables"), OSError(5, "input/output error")])
@virtual
async def test_any_failure_is_followed_by_a_repair(error):
    errors = []
    sets = sets_with_hub(trouble=lambda deletes, adds: errors.pop() if errors else None)
    async with Writer(POLICY, sets).running() as writer:
        errors.append(error)
        number = writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.09)
        assert writer.answers[number].applied
        assert writer.manager.failures == 1
        assert writer.manager.problem == str(error)
        await asyncio.sleep(0.1)
        assert writer.manager.repairs == 2
        assert writer.manager.problem is None


@virtual
async def test_a_transaction_that_was_applied_and_reported_as_failed_does_no_harm():
    errors = []
    sets = sets_with_hub(late_trouble=lambda: errors.pop() if errors else None)
    async with Writer(POLICY, sets).running() as writer:
        errors.append(OSError(105, "no buffer space"))
        number = writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.09)
        assert writer.answers[number].applied
        assert writer.wanted() == writer.in_kernel()


# Others


@virtual
async def test_a_missing_table_met_by_a_batch_is_repaired_at_once():
    async with Writer(POLICY, sets_with_hub()).running() as writer:
        for number, one in enumerate(fresh(300)):
            writer.ask(f"n{number}.example.com", one)
        await asyncio.sleep(0.05)
        writer.sets.flush()
        writer.sets.changed.clear()  # and nobody tells
        number = writer.ask("late.example.com", ONE)
        await asyncio.sleep(0.05)
        assert writer.answers[number].applied
        assert writer.in_kernel() == writer.wanted()
        assert writer.manager.status()["state"] == "enforcing"


@virtual
async def test_a_flush_is_repaired_counted_and_told_once():
    async with Writer(POLICY, sets_with_hub()).running() as writer:
        for number, one in enumerate(fresh(300)):
            writer.ask(f"n{number}.example.com", one)
        await asyncio.sleep(1)
        with capture_logs() as lines:
            writer.sets.flush()
            await asyncio.sleep(1)
        assert writer.in_kernel() == writer.wanted()
        assert writer.manager.drift == 300
        assert writer.manager.repairs == 2
        [line] = [line for line in lines if "by others" in line["event"]]
        assert (line["missing"], line["extra"]) == (300, 0)


@virtual
async def test_foreign_elements_are_taken_out_of_our_sets_and_counted():
    async with Writer(POLICY, sets_with_hub()).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(1)
        writer.sets.add(PORT4, key_of(TWO, 6, 22), "")
        writer.sets.remove(PORT4, key_of(ONE, 6, 443))
        writer.sets.add(HUB, THREE, "by hand")
        await asyncio.sleep(1)
        assert set(writer.sets.kernel[PORT4]) == keys(ONE)
        assert writer.sets.kernel[HUB] == {THREE: "by hand"}
        assert writer.manager.drift == 2


@virtual
async def test_after_a_foreign_change_nothing_is_released_until_acknowledged_anew():
    async with Writer(POLICY, sets_with_hub(delay=milliseconds(5))).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.5)
        writer.sets.flush()
        await asyncio.sleep(0.001)
        number = writer.ask("a.example.com", ONE)
        assert number not in writer.answers
        await asyncio.sleep(0.2)
        assert writer.answers[number].wire == b"answer"
        assert writer.unapplied() == []


@virtual
async def test_an_acknowledgement_older_than_a_foreign_change_is_not_believed():
    async with Writer(POLICY, sets_with_hub(delay=milliseconds(5))).running() as writer:
        await asyncio.sleep(0.5)
        number = writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.007)  # applied, not acknowledged
        assert writer.sets.has(writer.elements("a.example.com", ONE))
        writer.sets.remove(PORT4, key_of(ONE, 6, 443))
        await asyncio.sleep(0.1)
        assert writer.answers[number].applied


@virtual
async def test_what_was_read_before_a_foreign_change_is_not_believed():
    async with Writer(POLICY, sets_with_hub(delay=milliseconds(5))).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(1)
        writer.sets.changed.set()  # 5 ms each to ensure ours and theirs, to read, and to hear what was read
        await asyncio.sleep(0.0175)
        writer.sets.remove(PORT4, key_of(ONE, 6, 443))
        await asyncio.sleep(0.004)
        number = writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.5)
        assert writer.answers[number].applied
        assert writer.in_kernel() == writer.wanted()


@virtual
async def test_a_busy_neighbour_causes_few_repairs():
    async with Writer(POLICY, sets_with_hub(delay=milliseconds(1))).running() as writer:
        await asyncio.sleep(1)
        before, started = writer.manager.repairs, writer.clock()
        for _ in range(1000):
            writer.sets.changed.set()
            await asyncio.sleep(0.01)
        took = writer.clock() - started
        assert writer.manager.repairs - before <= took / manager_module.REST + 1
        assert writer.manager.repairs - before >= 10


# Leases and policy


@virtual
async def test_an_address_leaves_the_set_when_its_lease_is_over():
    async with Writer(POLICY, sets_with_hub(), gc_interval=10).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(30)
        writer.ask("b.example.com", TWO)
        await asyncio.sleep(45)
        assert set(writer.sets.kernel[PORT4]) == keys(TWO)
        assert writer.manager.drift == 0


@virtual
async def test_who_asks_during_a_deletion_waits_and_gets_the_element_back():
    sets = sets_with_hub(delay=milliseconds(5))
    async with Writer(POLICY, sets, gc_interval=10).running() as writer:
        writer.ask("a.example.com", ONE)
        await until(lambda: any(deletes for deletes, _ in sets.transactions), 0.001)
        number = writer.ask("a.example.com", ONE)
        assert number not in writer.answers
        await asyncio.sleep(0.05)
        assert writer.answers[number].applied
        assert set(sets.kernel[PORT4]) == keys(ONE)


@virtual
async def test_collection_spares_what_a_user_added_to_a_set_of_theirs():
    sets = sets_with_hub()
    sets.kernel[HUB] = {ONE: "by hand"}
    async with Writer(POLICY, sets, gc_interval=10).running() as writer:
        writer.ask("hub.example.org", ONE, TWO)
        await asyncio.sleep(1)
        assert sets.kernel[HUB] == {ONE: "by hand", TWO: "hub.example.org."}
        await asyncio.sleep(100)
        assert sets.kernel[HUB] == {ONE: "by hand"}
        assert writer.manager.drift == 0


@virtual
async def test_a_new_policy_reaches_the_sets_at_once_also_for_cached_names():
    async with Writer(POLICY, sets_with_hub()).running() as writer:
        writer.ask("one.lookup.test", ONE)
        writer.ask("a.example.com", TWO)
        await asyncio.sleep(1)
        writer.swap(LATER)
        await asyncio.sleep(0.05)
        assert set(writer.sets.kernel[PORT4]) == keys(ONE, port=80) | keys(TWO)
        writer.swap(POLICY.replace("443/TCP", "8443/TCP"))
        await asyncio.sleep(0.05)
        assert set(writer.sets.kernel[PORT4]) == keys(TWO, port=8443)
        assert writer.manager.drift == 0


@virtual
async def test_a_policy_swapped_in_the_middle_of_a_repair_is_the_one_that_counts():
    async with Writer(POLICY, sets_with_hub(delay=milliseconds(1))).running() as writer:
        writer.ask("a.example.com", TWO)
        await asyncio.sleep(1)
        for wait in range(40):
            writer.swap(LATER if wait % 2 else POLICY)
            await asyncio.sleep(wait / 1000)
            writer.swap(POLICY.replace("443/TCP", "8443/TCP"))
            await asyncio.sleep(0.5)
            assert set(writer.sets.kernel[PORT4]) == keys(TWO, port=8443)


@virtual
async def test_a_removed_endpoint_loses_its_elements_and_its_holds():
    async with Writer(POLICY, sets_with_hub(delay=milliseconds(5))).running() as writer:
        writer.ask("a.example.com", ONE, who="web")
        await asyncio.sleep(1)
        number = writer.ask("b.example.com", TWO, who="web")
        head, _, policy = POLICY.split("---\n")
        writer.swap(f"{head}---\n{policy}")
        await asyncio.sleep(0.001)
        assert writer.answers[number].wire == b"denial"
        assert writer.ends[number][0] == "policy"
        await asyncio.sleep(1)
        assert writer.sets.kernel[WEB4] == {}
        assert writer.manager.status()["state"] == "enforcing"
        assert writer.manager.failures == 0


@virtual
async def test_a_set_that_left_together_with_its_endpoint_is_no_trouble():
    async with Writer(POLICY, sets_with_hub()).running() as writer:
        writer.ask("a.example.com", ONE, who="web")
        await asyncio.sleep(1)
        del writer.sets.kernel[WEB4]
        head, _, policy = POLICY.split("---\n")
        writer.swap(f"{head}---\n{policy}")
        await asyncio.sleep(1)
        assert WEB4 not in writer.plan.applied
        assert WEB4 not in writer.sets.kernel
        assert writer.manager.failures == 0


@virtual
async def test_what_an_old_policy_wanted_is_written_no_more_after_a_swap():
    async with Writer(POLICY, sets_with_hub()).running() as writer:
        writer.ask("one.lookup.test", *fresh(900))
        writer.ask("two.lookup.test", *fresh(900, 1000))
        writer.ask("three.lookup.test", *fresh(900, 2000))
        await asyncio.sleep(1)
        writer.sets.delay = milliseconds(5)
        writer.swap(LATER)
        await until(lambda: writer.sets.transactions, 0.001)
        writer.swap(POLICY)
        await asyncio.sleep(1)
        added = [each for _, adds in writer.sets.transactions for each in adds]
        assert 0 < len(added) <= manager_module.TRANSACTION
        assert writer.in_kernel() == {}


# Long things


@virtual
async def test_answers_do_not_wait_for_a_long_repair(monkeypatch):
    monkeypatch.setattr(plan_module, "STEP", 10)
    sets = sets_with_hub(delay=milliseconds(1))
    async with Writer(POLICY, sets).running() as writer:
        for number, one in enumerate(fresh(2000)):
            writer.ask(f"n{number}.example.com", one)
        await asyncio.sleep(1)
        writer.manager.foreign_change()
        for number in range(200):
            writer.ask(f"m{number}.example.com", *fresh(1, 3000 + number))
            await asyncio.sleep(0.003)
        assert writer.manager.timeouts == 0
        assert writer.unapplied() == []
        assert max(held for _, held in writer.ends.values()) < 0.05


@virtual
async def test_everything_that_packets_feed_is_bounded(monkeypatch):
    monkeypatch.setattr(room_module, "WAITING", 10)
    sets = sets_with_hub(stuck=asyncio.Event())
    sets.stuck.set()
    async with Writer(POLICY, sets).running() as writer:
        sets.stuck.clear()
        numbers = [writer.ask("a.example.com", one) for one in fresh(15)]
        status = writer.manager.status()
        assert (status["waiting"], status["queued"]) == (10, 10)
        assert [writer.ends[each][0] for each in numbers[10:]] == ["hold limit"] * 5
        assert writer.manager.refused == 5
        sets.stuck.set()
        await asyncio.sleep(0.09)
        assert all(writer.answers[each].applied for each in numbers[:10])
        await asyncio.sleep(0.5)
        assert writer.in_kernel() == writer.wanted()  # also what was not let in


# Crowds, and busy neighbours


@virtual
async def test_whatever_one_endpoint_floods_another_ones_name_is_in_the_next_transaction():
    sets = sets_with_hub(delay=milliseconds(2))
    async with Writer(POLICY, sets, hold=10.0).running() as writer:
        for number in range(500):
            writer.ask(f"n{number}.example.com", *fresh(100, 100 * number))
        await until(lambda: len(sets.transactions) > 5, 0.001)
        before = len(sets.transactions)
        quiet = writer.ask("a.example.com", ONE, who="web")
        await until(lambda: quiet in writer.answers, 0.001)
        assert len(sets.transactions) <= before + 2
        assert writer.answers[quiet].applied
        assert writer.manager.status()["queued"] > 40_000


@virtual
async def test_who_waits_behind_a_flood_is_looked_at_twice_and_no_more():
    sets = sets_with_hub()
    async with Writer(POLICY, sets, hold=10.0).running() as writer:
        looked = 0
        lacking = writer.plan.lacking

        def counting(elements):
            nonlocal looked
            looked += len(elements)
            return lacking(elements)

        writer.plan.lacking = counting
        for number in range(80):
            writer.ask(f"n{number}.example.com", *fresh(100, 100 * number))
        await until(lambda: len(writer.answers) == 80, 0.001)
        assert looked <= 2 * 8_000


async def neighbour(writer, seconds, every=0.03):
    """Let somebody else change a table that we use, all the time."""
    until_then = writer.clock() + seconds
    while writer.clock() < until_then:
        writer.sets.changed.set()
        await asyncio.sleep(every)


@virtual
async def test_what_was_revoked_goes_at_once_however_busy_a_neighbour_is():
    sets = sets_with_hub(delay=milliseconds(15))
    async with Writer(POLICY, sets).running() as writer:
        writer.ask("a.example.com", ONE)
        writer.ask("one.lookup.test", TWO)
        await asyncio.sleep(1)
        busy = asyncio.ensure_future(neighbour(writer, 20))
        await asyncio.sleep(5)
        writer.swap(LATER.replace('"*.example.com"', '"*.example.net"'))
        await asyncio.sleep(1)
        assert set(sets.kernel[PORT4]) == keys(TWO, port=80)
        await busy


@virtual
async def test_what_has_expired_and_what_is_foreign_goes_however_busy_a_neighbour_is():
    sets = sets_with_hub(delay=milliseconds(15))
    async with Writer(POLICY, sets, gc_interval=10).running() as writer:
        writer.ask("a.example.com", ONE)
        busy = asyncio.ensure_future(neighbour(writer, 100))
        await asyncio.sleep(5)
        sets.kernel[PORT4][key_of(TWO, 6, 22)] = "foreign"
        await asyncio.sleep(5)
        assert set(sets.kernel[PORT4]) == keys(ONE)
        await asyncio.sleep(70)
        assert sets.kernel[PORT4] == {}
        await busy


@virtual
async def test_what_was_revoked_does_not_wait_until_everything_is_read_back():
    sets = sets_with_hub()
    async with Writer(POLICY, sets).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(1)
        read = sets.read

        async def slow(spec):
            await asyncio.sleep(3 if spec.ours else 0)
            return await read(spec)

        sets.read = slow
        writer.swap(POLICY.replace('"*.example.com"', '"*.example.net"'))
        await asyncio.sleep(0.1)
        assert sets.kernel[PORT4] == {}


@virtual
async def test_lasting_doubt_is_told_and_ends():
    sets = sets_with_hub(delay=milliseconds(15))
    async with Writer(POLICY, sets).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(1)
        with capture_logs() as lines:
            writer.sets.changed.set()
            await asyncio.sleep(0.001)
            assert writer.manager.status()["doubted"] == 1
            await neighbour(writer, manager_module.DOUBT + 5)
            status = writer.manager.status()
            assert status["state"] == "enforcing"
            assert "other programs" in status["problem"]
        assert [line["event"] for line in lines].count("sets are in doubt") == 1
        await asyncio.sleep(2)
        assert writer.manager.status()["problem"] is None
        assert writer.manager.status()["doubted"] == 0


# Swaps, once more


@virtual
async def test_who_lost_its_permission_while_waiting_is_refused():
    sets = sets_with_hub(stuck=asyncio.Event())
    sets.stuck.set()
    async with Writer(POLICY, sets).running() as writer:
        sets.stuck.clear()
        number = writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.01)
        writer.swap(POLICY.replace('"*.example.com"', '"*.example.net"'))
        sets.stuck.set()
        await asyncio.sleep(0.01)
        assert writer.answers[number].wire == b"denial"
        assert writer.ends[number][0] == "policy"
        await asyncio.sleep(1)
        assert writer.in_kernel() == {}


@virtual
async def test_who_opens_something_else_now_waits_for_that():
    sets = sets_with_hub(stuck=asyncio.Event())
    sets.stuck.set()
    async with Writer(POLICY, sets).running() as writer:
        sets.stuck.clear()
        number = writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.01)
        writer.swap(POLICY.replace("443/TCP", "8443/TCP"))
        sets.delay = milliseconds(2)
        sets.stuck.set()
        await until(lambda: number in writer.answers, 0.001)
        assert writer.answers[number].wire == b"answer"
        assert sets.has(writer.elements("a.example.com", ONE))
        assert set(sets.kernel[PORT4]) >= keys(ONE, port=8443)


@virtual
async def test_a_set_that_was_removed_is_not_told_to_be_enforced_again():
    async with Writer(POLICY, FakeSets()).running() as writer:
        await asyncio.sleep(1)
        assert writer.manager.failing.keys() == {HUB}
        with capture_logs() as lines:
            writer.swap(POLICY.replace(', set: "4#inet#fw4#hub"', ""))
            await asyncio.sleep(1)
        assert lines == []


# Collections and zombies


def quiet_pass(writer):
    """A pass over the connections that sees none."""
    passes = writer.caches.passes
    passes.complete(passes.begin(), writer.clock())


@virtual
async def test_an_address_stays_in_the_set_as_a_zombie_until_two_passes_saw_nothing():
    sets = sets_with_hub()
    async with Writer(POLICY, sets, gc_interval=10, zombies_per_endpoint=10).running() as writer:
        writer.ask("hub.example.org", ONE)
        await asyncio.sleep(100)
        assert set(sets.kernel[PORT4]) == keys(ONE)
        assert set(sets.kernel[HUB]) == {ONE}
        quiet_pass(writer)
        await asyncio.sleep(30)
        assert set(sets.kernel[PORT4]) == keys(ONE)
        quiet_pass(writer)
        repairs = writer.manager.repairs
        await until(lambda: not sets.kernel[PORT4] and not sets.kernel[HUB], 1)
        assert writer.manager.repairs - repairs <= 1


@virtual
async def test_a_collection_asks_only_for_what_left_not_for_everything():
    sets = sets_with_hub()
    settings = {"gc_interval": 10, "repair_interval": 1e6}
    async with Writer(POLICY, sets, **settings).running() as writer:
        for number, one in enumerate(fresh(300)):
            writer.ask(f"n{number}.example.com", one, ttl=70 if number else 0)
        walked = []
        wishes = writer.plan._wishes
        writer.plan._wishes = lambda: walked.append(1) or wishes()
        await asyncio.sleep(75)
        assert len(sets.kernel[PORT4]) == 299
        assert walked == []


@virtual
async def test_pressing_caches_are_collected_at_once():
    async with Writer(POLICY, sets_with_hub(), gc_interval=1e6, names_per_endpoint=10).running() as writer:
        for number, one in enumerate(fresh(17)):
            writer.ask(f"n{number}.lookup.test", one)
        assert writer.caches.pressing
        await asyncio.sleep(1.1)
        assert not writer.caches.pressing


@virtual
async def test_without_deletes_nothing_is_removed_until_it_is_allowed():
    sets = sets_with_hub()
    sets.kernel[PORT4] = {key_of(TWO, 6, 22): "old.example.net."}
    async with Writer(POLICY, sets, gc_interval=10, deletes=False).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(200)
        writer.swap(POLICY.replace('"*.example.com"', '"*.example.net"'))
        await asyncio.sleep(1)
        assert set(sets.kernel[PORT4]) == keys(ONE) | keys(TWO, port=22)
        assert len(writer.caches.of("default/ci")) == 1
        writer.manager.deletes = True
        await asyncio.sleep(0.1)
        assert sets.kernel[PORT4] == {}
        await asyncio.sleep(11)
        assert len(writer.caches.of("default/ci")) == 0


@virtual
async def test_a_resync_repairs_now_and_says_what_prevents_it():
    sets = sets_with_hub()
    async with Writer(POLICY, sets).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(1)
        sets.kernel[PORT4].clear()  # and nobody tells
        await writer.manager.resync()
        assert set(sets.kernel[PORT4]) == keys(ONE)
        assert writer.manager.drift == 1
        sets.rights = False
        with pytest.raises(RightsError, match="CAP_NET_ADMIN"):
            await writer.manager.resync()


@virtual
async def test_claims_of_an_earlier_process_clean_sets_that_no_policy_names_any_more():
    old = SetSpec("inet", "fw4", "old", 4, ports=False, ours=False)
    sets = sets_with_hub()
    sets.kernel[old] = {ONE: "www.example.com.", TWO: "by hand"}
    sets.kernel[WEB4._replace(name="ep.default.gone.port4")] = {key_of(ONE, 6, 443): "a.example.com."}
    writer = Writer(POLICY, sets)
    gone = WEB4._replace(name="ep.default.gone.port4")
    writer.plan.restore([(old, ONE, "www.example.com.")], [gone])
    async with writer.running():
        assert sets.kernel[old] == {TWO: "by hand"}
        assert sets.kernel[gone] == {}


@virtual
async def test_an_answer_that_opens_too_much_is_told_once_and_counted(monkeypatch):
    monkeypatch.setattr(plan_module, "ELEMENTS", 10)
    sets = sets_with_hub()
    async with Writer(POLICY, sets).running() as writer:
        with capture_logs() as lines:
            for _ in range(3):
                writer.ask("a.example.com", *fresh(15))
                await asyncio.sleep(0.1)
        assert len(sets.kernel[PORT4]) == 10
        assert writer.manager.status()["cut"] == 15
        [line] = lines
        assert (line["endpoint"], line["name"]) == ("default/ci", "a.example.com.")


@virtual
async def test_hold_times_are_counted():
    async with Writer(POLICY, sets_with_hub(delay=milliseconds(5))).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.1)
        assert sum(writer.manager.hold_seconds.counts) == 1
        assert writer.manager.hold_seconds.sum == pytest.approx(0.010)


# Start and stop


@virtual
async def test_the_start_adopts_what_the_sets_still_hold_and_removes_the_rest():
    sets = sets_with_hub()
    sets.kernel[PORT4] = {key_of(ONE, 6, 443): "a.example.com.", key_of(TWO, 6, 22): "old.example.net."}
    writer = Writer(POLICY, sets, zombies_per_endpoint=10)
    await settled(writer)
    assert sets.kernel[PORT4] == {key_of(ONE, 6, 443): "a.example.com."}
    assert set(writer.caches.zombies["default/ci"].addresses(from_text("a.example.com"))) == {ONE}
    assert sets.kernel.keys() == set(writer.plan.specs())
    assert writer.manager.drift == 0
    assert writer.manager.status()["state"] == "enforcing"
    number = writer.ask("a.example.com", ONE)
    assert writer.answers[number].applied


@virtual
async def test_a_start_without_rights_says_so():
    writer = Writer(POLICY, sets_with_hub(rights=False))
    assert writer.manager.status()["state"] == "starting"
    async with writer.running(start=False):
        await asyncio.sleep(1)
        assert writer.manager.status()["state"] == "not enforcing"
        assert "CAP_NET_ADMIN" in writer.manager.status()["problem"]


@virtual
async def test_holds_that_came_before_the_start_wait_for_it():
    writer = Writer(POLICY, sets_with_hub())
    number = writer.ask("a.example.com", ONE)
    async with writer.running(start=False):
        await asyncio.sleep(0.05)
        assert writer.answers[number].applied


@virtual
async def test_at_the_end_who_still_waits_is_refused():
    sets = sets_with_hub(stuck=asyncio.Event())
    sets.stuck.set()
    writer = Writer(POLICY, sets)
    async with writer.running():
        sets.stuck.clear()
        number = writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.001)
    assert writer.answers[number].wire == b"refusal"
    assert writer.ends[number][0] == "stopping"


@virtual
async def test_the_status_can_be_written_down():
    async with Writer(POLICY, FakeSets()).running() as writer:
        writer.ask("a.example.com", ONE)
        await asyncio.sleep(0.05)
        status = json.loads(json.dumps(writer.manager.status()))
        assert status["applied"] == status["elements"] == status["released"] == 1
        assert status["state"] == "enforcing"


async def test_the_writer_runs_on_the_loop_of_this_run():
    async with Writer(POLICY, sets_with_hub(), hold=10.0).running() as writer:
        numbers = [writer.ask(f"n{each}.example.com", one) for each, one in enumerate(fresh(500))]
        await until(lambda: len(writer.answers) == len(numbers))
        assert writer.unapplied() == []
        assert writer.in_kernel() == writer.wanted()


def test_what_a_limit_cuts_off_is_named_once_a_minute():
    """The endpoint, and one of the names and addresses; how many others is told, too."""
    now = [0.0]
    writer = manager_module.NameManager.__new__(manager_module.NameManager)
    writer._clock, writer._told_of_evicted = (lambda: now[0]), {}
    name = from_text("db.example")
    cut = [Gone(name, bytes((192, 0, 2, last)), "evicted live") for last in (1, 2)]
    with capture_logs() as told:
        for now[0] in (0.0, 59.0, 60.0):
            writer._tell_of_evicted(
                {"default/ci": [Gone(name, b"\x00" * 4, "idle"), *cut], "default/web": []}
            )
    assert [(each["endpoint"], each["name"], each["address"], each["others"]) for each in told] == [
        ("default/ci", "db.example.", "192.0.2.1", 1)
    ] * 2
