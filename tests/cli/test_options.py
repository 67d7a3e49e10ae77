"""What the commands share: the lists in help, and what a shell completes."""

from __future__ import annotations

from command_line import process


def completed(line: str, **environment: str) -> set[str]:
    """Return what bash is offered for a line whose last word is being typed."""
    words = line.split(" ")
    done = process(
        _DNSPROXY_COMPLETE="bash_complete",
        COMP_WORDS=f"dnsproxy {line}",
        COMP_CWORD=str(len(words)),
        **environment,
    )
    assert done.stderr == ""
    return {each.partition(",")[2] for each in done.stdout.splitlines() if each}


def test_endpoints_of_the_files_are_completed(folder):
    config = str(folder / "dnsproxy.yaml")
    assert completed("policy trace -e b", DNSPROXY_CONFIG=config) == {"build/ci-runner"}
    assert completed("policy trace -e ci", DNSPROXY_CONFIG=config) == {"build/ci-runner"}


def test_endpoints_of_the_daemon_are_completed(daemon):
    daemon.says("GET /v1/endpoints", [{"endpoint-id": "default/ci"}, {"endpoint-id": "default/host"}])
    assert completed("cache list -e default/h", DNSPROXY_SOCKET=str(daemon.path)) == {"default/host"}


def test_without_files_or_daemon_nothing_is_completed_and_nothing_said(tmp_path):
    assert completed("cache list -e x", DNSPROXY_SOCKET=str(tmp_path / "none")) == set()
    assert completed("policy trace -e x", DNSPROXY_CONFIG=str(tmp_path / "none")) == set()


def test_types_are_completed():
    assert completed("policy trace -t AA") == {"AAAA"}
