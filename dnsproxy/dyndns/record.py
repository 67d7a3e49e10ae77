"""One record and its task: find the addresses, plan, publish, plan, sleep.

A pass does what is due, in this order, and says when the next one is:

    disabled?  password?  halted?  find  decide  note that a request is made  publish  note the answer

What is decided stands in `plan.py`. The note on disk comes before the request, and a request that could not
be noted is made only when this process has run for as long as two requests have to be apart: a process that
dies and comes back all the time can then neither forget nor repeat.

Events come on transitions; what was told last is part of what is stored, so that a restart repeats nothing.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final, Literal
from urllib.parse import quote

import structlog

from dnsproxy.dyndns import plan
from dnsproxy.dyndns.documents import Missing
from dnsproxy.dyndns.outcomes import Code, Found, Known, NotManaged, Password, Reply, Unavailable, Why
from dnsproxy.dyndns.plan import RULES, Kind, Phase, Publish, Rest, Target
from dnsproxy.dyndns.status import Event, View, advice, trouble

if TYPE_CHECKING:
    from dnsproxy.dyndns.documents import Domain
    from dnsproxy.dyndns.outcomes import Finding, Request, Search, Wanted
    from dnsproxy.dyndns.sync import Sync

PATIENCE: Final = 120.0  # seconds for a search or a request; both have time-outs of their own, below this
NAP: Final = 60.0  # seconds of a sleep after which the clocks are compared
LEAP: Final = 60.0  # seconds that the wall clock is ahead of us after a suspend

log = structlog.get_logger("dnsproxy")


class Record:
    """One record and its task. `view` is all that is known of it."""

    def __init__(self, sync: Sync, view: View) -> None:
        self.view = view
        self._sync = sync
        self._stored = view.state
        self._wake = asyncio.Event()
        self._tries = 0  # searches that found nothing, in a row

    # -- from outside

    def wake(self) -> None:
        """Have a pass made now."""
        self._wake.set()

    def change(self, domain: Domain) -> None:
        """Take another document."""
        if domain != self.view.domain:
            self._show(domain=domain)
            self.wake()

    def force(self) -> str | None:
        """Have a request made though nothing differs; return why not."""
        if not self.view.domain.enabled:
            return "the record is disabled"
        state = plan.forced(self.view.state, self._sync.clock())
        if isinstance(state, str):
            return state
        self._show(state=state)
        self.wake()
        return None

    def resume(self) -> str | None:
        """End the hold; return why not."""
        if self.view.state.hold is None:
            return "the record is not held"
        self._resumed("resumed by hand")
        self.wake()
        return None

    # -- the task

    async def run(self, delay: float) -> None:
        """Make one pass after the other until cancelled, the first one after `delay` seconds."""
        upcoming = self._sync.clock() + delay
        while True:
            self._show(next_run=upcoming)
            await self._sleep(upcoming)
            self._wake.clear()
            try:
                upcoming = await self._pass()
                await self._store()
            except Exception as error:  # a fault of ours in one record ends no other
                upcoming = self._broken(error)

    async def _sleep(self, until: float) -> None:
        """Sleep until then, until woken, or until the wall clock says that the whole machine has slept."""
        ahead = self._ahead()
        while (left := until - self._sync.clock()) > 0 and not self._wake.is_set():
            with suppress(TimeoutError):
                async with asyncio.timeout(min(left, NAP)):
                    await self._wake.wait()
            if self._ahead() - ahead > LEAP:
                return

    def _ahead(self) -> float:
        clock = self._sync.now()
        return clock.wall - clock.now

    async def _pass(self) -> float:
        """Do what is to be done now, and return when to do so again."""
        domain, now = self.view.domain, self._sync.clock()
        self._show(last_loop=now)
        if not domain.enabled:
            return self._disabled(now)
        password = await self._password(domain)
        if isinstance(password, Missing):
            return self._without(password.reason, now)
        self._say("secret", "")
        fingerprint = f"{domain.fingerprint}.{password.fingerprint(domain.hostname)}"
        self._lift(fingerprint)
        hold = self.view.state.hold
        if hold is not None and hold.until is None:
            return self._rest(Rest(Phase.HALTED), domain)
        found = await self._find(domain)
        if self.view.domain is not domain:
            return self._sync.clock()  # what was looked for is not what is wanted now
        addresses = plan.addresses(found, self.view.state.accepted)
        if not addresses:
            return self._nowhere(found, domain)
        self._tries = 0
        target = Target(domain.endpoint, domain.hostname, domain.username, addresses)
        return await self._reach(target, domain, password, fingerprint)

    async def _reach(self, target: Target, domain: Domain, password: Password, fingerprint: str) -> float:
        self._say_change(target)
        decision = self._decide(target, domain)
        if isinstance(decision, Rest):
            if decision.phase is Phase.IN_SYNC:
                self._say_skipped(target)
            return self._rest(decision, domain)
        if (later := await self._noted()) is not None:
            return self._rest(Rest(Phase.SPACED, later), domain)
        reply = await self._publish(target.request(password), target.hostname, password)
        now = self._sync.clock()
        stop = domain.stop_on_abuse
        self._show(state=plan.settle(self.view.state, target, reply, now, fingerprint, stop_on_abuse=stop))
        self._say_reply(target, reply)
        after = self._decide(target, domain)
        return self._rest(after, domain) if isinstance(after, Rest) else now + plan.SPACING

    def _decide(self, target: Target, domain: Domain) -> Rest | Publish:
        return plan.decide(self.view.state, target, self._sync.clock(), domain.refresh)

    async def _noted(self) -> float | None:
        """Note on disk that a request is made now; return until when to wait if that cannot be done."""
        begun = plan.begin(self.view.state, self._sync.clock())
        safe = self._sync.started + plan.SPACING
        if await self._sync.remember(self.view.domain.hostname, begun):
            self._stored = begun
        elif self._sync.clock() < safe:
            return safe
        self._show(state=plan.begin(self.view.state, self._sync.clock()))  # the disk took its time
        return None

    # -- what the world is asked for

    async def _password(self, domain: Domain) -> Password | Missing:
        if isinstance(domain.password, Password | Missing):
            return domain.password
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._sync.passwords(domain.password)
        except TimeoutError:
            return Missing(f"{domain.password.kind} {domain.password.name}: could not be read in time")

    async def _find(self, domain: Domain) -> Found:
        """Return both families, the fixed one as it is written."""
        search, fixed = domain.search, {len(each.address): each for each in domain.fixed}
        found = Found(fixed.get(4, NotManaged()), fixed.get(16, NotManaged()))
        if search.ipv4 is not None or search.ipv6 is not None:
            looked = await self._search(self._informed(search))
            found = Found(fixed.get(4, looked.ipv4), fixed.get(16, looked.ipv6), looked.cgnat)
        for family, finding in (("ipv4", found.ipv4), ("ipv6", found.ipv6)):
            if not isinstance(finding, NotManaged):
                self._sync.checks[family, _result(finding)] += 1
        self._say_found(found)
        return found

    async def _search(self, search: Search) -> Found:
        try:
            async with asyncio.timeout(PATIENCE):
                return await self._sync.detector.find(search)
        except TimeoutError:
            late = Unavailable(Why.FAILED, f"no source answered within {PATIENCE:.0f} s")
            return Found(late if search.ipv4 else NotManaged(), late if search.ipv6 else NotManaged())

    def _informed(self, search: Search) -> Search:
        """Return the search with the addresses that were accepted last, which one answer confirms."""
        accepted = self.view.state.accepted
        known = {len(each): each for each in accepted.packed} if accepted else {}
        return replace(
            search, ipv4=_knowing(search.ipv4, known.get(4)), ipv6=_knowing(search.ipv6, known.get(16))
        )

    async def _publish(self, request: Request, hostname: str, password: Password) -> Reply:
        started = self._sync.clock()
        try:
            async with asyncio.timeout(PATIENCE):
                reply = await self._sync.publisher.publish(request)
        except TimeoutError:
            reply = Reply(Code.TIMEOUT, f"no answer within {PATIENCE:.0f} s")
        except Exception as error:  # it may have been sent: the answer is doubt, not silence
            reply = Reply(Code.UNKNOWN, f"{type(error).__name__}: {error}")
        self._sync.seconds.observe(self._sync.clock() - started)
        self._sync.updates[hostname, reply.code.value] += 1
        return replace(reply, text=redacted(reply.text, request.username, password))

    # -- ends of a pass

    def _disabled(self, now: float) -> float:
        hold = self.view.state.hold
        if hold is not None and hold.until is None:  # what ends by itself is the provider's to end
            self._resumed("disabled")
        self._show(phase=Phase.DISABLED, problem="")
        return now + self.view.domain.interval

    def _without(self, reason: str, now: float) -> float:
        self._show(phase=Phase.NO_SECRET, problem=reason)
        self._say("secret", "missing", "SecretMissing", "Warning", reason)
        return now + self.view.domain.interval

    def _nowhere(self, found: Found, domain: Domain) -> float:
        self._tries += 1
        why = trouble(found)
        self._show(phase=Phase.NO_ADDRESS, problem=why.reason if why else "no address is managed")
        return plan.retry_check(self._tries, domain.interval, self._sync.clock())

    def _rest(self, rest: Rest, domain: Domain) -> float:
        found = self.view.found
        why = trouble(found) if found and rest.phase is not Phase.HALTED else None
        self._show(phase=rest.phase, problem=why.reason if why else "")
        return plan.next_check(rest, domain.interval, self._sync.clock(), self._sync.chance())

    def _broken(self, error: Exception) -> float:
        """Note a fault of ours; its text may be anything, so only its name is shown."""
        name = type(error).__name__
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        where = f"{trace.tb_frame.f_code.co_name}:{trace.tb_lineno}" if trace else ""
        log.error("a pass broke off; the record is tried again", record=self.view.domain.title,
                  error=name, where=where)  # fmt: skip
        self._show(problem=f"internal error ({name} in {where}): please report it")
        return self._sync.clock() + plan.SPACING

    # -- what is kept and told

    def _show(self, **changes: object) -> None:
        self.view = replace(self.view, **changes)  # type: ignore[arg-type]  # its own fields

    async def _store(self) -> None:
        if self.view.state != self._stored:
            state = self.view.state
            if await self._sync.remember(self.view.domain.hostname, state):
                self._stored = state

    def _lift(self, fingerprint: str) -> None:
        if plan.lifted(self.view.state, fingerprint) is not self.view.state:
            self._resumed("the document or the password has changed")

    def _resumed(self, why: str) -> None:
        self._show(state=plan.resumed(self.view.state))
        self._say("update", "")
        self._say("hold", "")
        self._tell("DynDnsUpdateResumed", "Normal", why)

    def _say_found(self, found: Found) -> None:
        self._show(found=found)
        why = trouble(found)
        if why is None:
            self._say("address", "")
        else:
            self._say("address", why.why.value, why.why.value, "Warning", why.reason)

    def _say_change(self, target: Target) -> None:
        accepted = self.view.state.accepted
        if accepted is None or accepted.addresses == target.addresses:
            self._say("change", "")
            return
        both = f"{', '.join(accepted.addresses)} -> {', '.join(target.addresses)}"
        self._say("change", both, "IpAddressChanged", "Normal", both)

    def _say_skipped(self, target: Target) -> None:
        text = f"updating skipped, {', '.join(target.addresses)} is up-to-date"
        self._say("skip", text, "DynDnsUpdateSkipped", "Normal", text)

    def _say_reply(self, target: Target, reply: Reply) -> None:
        if RULES[reply.code].kind is Kind.SUCCESS:
            self._say_success(target, reply)
            return
        state, sentence = self.view.state, advice(reply.code, self.view.state.text)
        self._say("update", reply.code.value, "DynDnsUpdateFailed", "Warning", sentence)
        if state.hold is not None and state.hold.until is None:
            halted = f"{sentence}; nothing is sent until the document or the password changes, or resume"
            self._say("hold", reply.code.value, "DynDnsUpdateHalted", "Warning", halted)
        elif state.hold is not None and state.hold.until is not None:
            minutes = (state.hold.until - state.hold.since) / 60
            delayed = f"{reply.code.value}: tried again after {minutes:.0f} minutes, later each time"
            self._say("hold", reply.code.value, "DynDnsUpdateDelayed", "Warning", delayed)

    def _say_success(self, target: Target, reply: Reply) -> None:
        self._say("update", "")
        self._say("hold", "")
        told = f"{', '.join(target.addresses)} ({reply.code.value})"
        self._tell("DynDnsUpdateCompleted", "Normal", told)
        if reply.stored and not set(reply.stored) & set(target.packed):
            self._tell(
                "DnsMismatch", "Warning", f"the provider says it stored others: {self.view.state.text}"
            )
        often = reply.code is Code.NOCHG and len(self.view.state.nochg) >= plan.NOCHG_MOST
        asks = "nochg three times within a day: does another program update this record, too?"
        self._say("nochg", "often" if often else "", "DynDnsUpdateDelayed", "Warning", asks)

    def _say(
        self,
        topic: str,
        key: str,
        reason: str = "",
        type_: Literal["Normal", "Warning"] = "Normal",
        message: str = "",
    ) -> None:
        """Tell something of a topic, unless it was the last that was told; an empty key ends the topic."""
        told = self.view.state.told
        if told.get(topic, "") == key:
            return
        rest = {each: value for each, value in told.items() if each != topic}
        self._show(state=replace(self.view.state, told=rest | ({topic: key} if key else {})))
        if key:
            self._tell(reason, type_, message)

    def _tell(self, reason: str, type_: Literal["Normal", "Warning"], message: str) -> None:
        domain, wall = self.view.domain, self._sync.now().wall
        self._sync.tell(Event(wall, type_, reason, domain.title, domain.fqdn, message))


def _knowing(wanted: Wanted | None, known: bytes | None) -> Wanted | None:
    return None if wanted is None else replace(wanted, known=known)


def _result(finding: Finding) -> str:
    return (
        "known"
        if isinstance(finding, Known)
        else finding.why.value
        if isinstance(finding, Unavailable)
        else ""
    )


def redacted(text: str, username: str, password: Password) -> str:
    """Return foreign text without the password, in whatever form a server may have sent it back."""
    octets = password.reveal()
    plain = octets.decode("utf-8", "replace")
    basic = b64encode(f"{username}:".encode() + octets).decode()
    for form in sorted(
        {plain, plain.strip(), quote(plain), quote(plain, safe=""), basic}, key=len, reverse=True
    ):
        if form:
            text = text.replace(form, "***")
    return text
