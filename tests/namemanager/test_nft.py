from __future__ import annotations

import ctypes
import errno
import threading

import pytest

from dnsproxy.errors import Cause, KernelError, RightsError, SetError
from dnsproxy.namemanager import netlink, nft
from dnsproxy.namemanager.elements import SetSpec
from dnsproxy.namemanager.netlink import Shape

# What the kernel itself does is tested in tests/kernel/test_nft_kernel.py; here are the sentences, and what
# happens to a process that lacks the right.

OURS = SetSpec("inet", "dnsproxy", "github4", 4, ports=False, ours=True)
USERS = SetSpec("inet", "fw4", "github", 4, ports=False, ours=False)


def test_a_missing_table_is_named_with_the_commands_that_make_it():
    problem = nft._problem(USERS, None)
    assert problem is not None
    assert problem.cause is Cause.TABLE_MISSING
    assert str(problem) == (
        "there is no table inet fw4: create it with `nft add table inet fw4` "
        "and `nft add set inet fw4 github '{ type ipv4_addr; }'`"
    )


def test_a_missing_set_is_named_with_the_command_that_makes_it():
    problem = nft._problem(USERS, {"other": Shape(7, 4, 0, 0)})
    assert problem is not None
    assert problem.cause is Cause.SET_MISSING
    assert str(problem) == (
        "there is no set inet fw4 github: create it with `nft add set inet fw4 github '{ type ipv4_addr; }'`"
    )


def test_a_misfit_says_what_is_there_what_is_needed_and_what_to_do():
    problem = nft._problem(USERS, {"github": Shape(8, 16, 0x4, 0)})
    assert problem is not None
    assert problem.cause is Cause.MISMATCH
    assert str(problem) == (
        "set inet fw4 github has type ipv6_addr, flags interval, needed is type ipv4_addr, without constant, "
        "interval or map: delete it and the rules that name it, then "
        "`nft add set inet fw4 github '{ type ipv4_addr; }'`, or name another set"
    )


def test_a_set_that_fits_is_no_problem():
    assert nft._problem(USERS, {"github": Shape(7, 4, 0x10, 100)}) is None


@pytest.mark.parametrize(
    ("number", "cause", "words"),
    [
        (errno.ENFILE, Cause.FULL, "set inet fw4 github is full (size 100)"),
        (errno.EPERM, Cause.OTHER, "belongs to another program (flag owner)"),
        (errno.ERANGE, Cause.OTHER, "name is too long"),
        (errno.ENOMEM, Cause.OTHER, "Cannot allocate memory"),
    ],
)
def test_a_refused_change_names_the_set_and_the_cause(number, cause, words):
    error = nft._refused(number, USERS, {"github": Shape(7, 4, 0, 100)})
    assert error.cause is cause
    assert words in str(error)
    assert "inet fw4 github" in str(error)


@pytest.mark.parametrize(
    ("number", "kind", "words"),
    [
        (errno.EPERM, RightsError, "AmbientCapabilities=CAP_NET_ADMIN"),
        (errno.EOPNOTSUPP, KernelError, "modprobe nf_tables"),
        (errno.ENOBUFS, SetError, "answer to a transaction was lost"),
        (errno.ENOMEM, SetError, "Cannot allocate memory"),
    ],
)
def test_a_transaction_refused_as_a_whole_says_why(number, kind, words):
    error = nft._refused_whole(number)
    assert type(error) is kind
    assert words in str(error)


def without_rights(body):
    """Run `body()` in a thread that has given up its capabilities, and return what it returns."""
    results: list = []

    def run():
        header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # linux/capability.h, version 3; this thread
        if ctypes.CDLL(None).capset(header, (ctypes.c_uint32 * 6)()) == 0:
            results.append(body())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    (result,) = results
    return result


def refused():
    with pytest.raises(RightsError) as error:
        nft.NftSets()
    return error.value


def test_without_cap_net_admin_there_is_one_clear_error_at_once():
    error = without_rights(refused)
    assert "CAP_NET_ADMIN" in str(error)
    assert error.exit_code == 5


class SilentSocket:
    """A kernel that takes everything and answers nothing."""

    def getsockopt(self, level, option):
        return 1 << 20

    def send(self, packet):
        pass

    def recv(self, size):
        raise BlockingIOError


def test_no_answer_is_not_taken_for_consent():
    connection = nft._Connection()
    connection.close()
    connection._socket = SilentSocket()
    with pytest.raises(nft._Refusal) as refusal:
        connection.transact([netlink.new_table(OURS)])
    assert refusal.value.number == errno.ENOBUFS
