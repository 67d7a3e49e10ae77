"""Files: reading policy folders, and noticing every way in which they change."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from dnsproxy.errors import DocumentError
from dnsproxy.files import (
    _look,
    changes,
    check_writable,
    policy_files,
    read_paths,
    read_policies,
    read_text,
    signature,
    unwritable,
)


def test_policy_files_come_in_lexical_order_without_hidden_ones(tmp_path):
    for name in ("20-b.yaml", "10-a.yml", ".swp.yaml", "notes.txt", "30-c.yaml~"):
        (tmp_path / name).write_text("")
    (tmp_path / "folder.yaml").mkdir()
    assert [path.name for path in policy_files(tmp_path)] == ["10-a.yml", "20-b.yaml"]


def test_policies_are_read_as_utf_8_with_or_without_a_mark(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfa: \xc3\xa4")
    assert read_policies(tmp_path) == [(str(tmp_path / "a.yaml"), "a: ä")]


def test_every_unreadable_file_is_named_with_the_next_step(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"ok: \xff")
    (tmp_path / "b.yaml").symlink_to(tmp_path / "gone")
    (tmp_path / "c.yaml").write_text("fine: 1")
    with pytest.raises(DocumentError) as caught:
        read_policies(tmp_path)
    first, second = map(str, caught.value.problems)
    assert first == f"{tmp_path}/a.yaml: byte 5 is not UTF-8; save the file as UTF-8"
    assert second.startswith(
        f"{tmp_path}/b.yaml: cannot be read: No such file or directory; create it, or name another"
    )


def test_a_file_without_rights_says_for_whom_it_must_be_readable(tmp_path):
    path = tmp_path / "a.yaml"
    path.touch(mode=0)
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)  # root reads everything
    try:
        with pytest.raises(
            DocumentError, match=f"Permission denied; make it readable for user {os.geteuid()}"
        ):
            read_text(path)
    finally:
        os.seteuid(before)


@pytest.fixture
def nobodys():
    """A folder of somebody without rights, who is who we are meanwhile: root may write everything."""
    before = os.geteuid()
    with TemporaryDirectory() as name:
        if before == 0:
            os.chown(name, 65534, -1)
            os.seteuid(65534)
        yield Path(name)
        Path(name).chmod(0o755)
        os.seteuid(before)


@pytest.mark.parametrize("rights", [0o755, 0o555, 0o666])
@pytest.mark.parametrize(
    "name", ["there", "barred", "new", "folder", "none/new", "there/new", "link", "gone"]
)
def test_what_cannot_be_written_is_what_cannot_be_opened(nobodys, name, rights):
    (nobodys / "there").touch(mode=0o600)
    (nobodys / "barred").touch(mode=0o400)
    (nobodys / "folder").mkdir()
    (nobodys / "link").symlink_to("there")
    (nobodys / "gone").symlink_to("none/new")
    nobodys.chmod(rights)
    file, said, met = nobodys / name, None, None
    try:
        check_writable(file)
    except DocumentError as error:
        said = str(error)
    assert not os.access(nobodys / "new", os.F_OK)
    try:
        os.close(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND))
    except OSError as error:
        met = str(unwritable(file, error))
    assert said == met


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "No such file or directory; create it"),
        (lambda path: path.touch(), "Not a directory; name a directory"),
    ],
)
def test_a_policy_directory_that_is_none(tmp_path, make, message):
    path = tmp_path / "policies.d"
    make(path)
    with pytest.raises(DocumentError, match=message):
        policy_files(path)


# -- change ---------------------------------------------------------------------------------------------


def kubelet_volume(folder, version: str, texts: dict[str, str]) -> None:
    """Lay out, or swap, a ConfigMap volume as kubelet does: data behind `..data`, names beside it."""
    data = folder / f"..{version}"
    data.mkdir()
    for name, text in texts.items():
        (data / name).write_text(text)
    (folder / "..data_tmp").symlink_to(data.name)
    (folder / "..data_tmp").rename(folder / "..data")
    for name in texts:
        if not (folder / name).is_symlink():
            (folder / name).symlink_to(f"..data/{name}")


def replace(path, text):
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").rename(path)


CHANGES = {
    "a line more": lambda folder: (folder / "a.yaml").write_text("one: 1\ntwo: 2\n"),
    "the same size": lambda folder: (folder / "a.yaml").write_text("one: 2\n"),
    "another file of the same text": lambda folder: replace(folder / "a.yaml", "one: 1\n"),
    "a new file": lambda folder: (folder / "b.yaml").write_text(""),
    "one file less": lambda folder: (folder / "a.yaml").unlink(),
    "another name": lambda folder: (folder / "a.yaml").rename(folder / "c.yaml"),
    "other rights": lambda folder: (folder / "a.yaml").chmod(0o600),
    "the folder gone": lambda folder: folder.rename(folder.with_name("moved")),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_signature_changes_with(tmp_path, change):
    folder = tmp_path / "policies.d"
    folder.mkdir()
    (folder / "a.yaml").write_text("one: 1\n")
    os.utime(folder / "a.yaml", ns=(0, 0))
    before = signature([folder])
    assert signature([folder]) == before
    change(folder)
    assert signature([folder]) != before


def test_files_that_are_no_policies_do_not_count(tmp_path):
    before = signature([tmp_path])
    (tmp_path / ".a.yaml.swp").write_text("")
    (tmp_path / "README").write_text("")
    assert signature([tmp_path]) == before


def test_a_kubelet_swap_changes_the_signature_though_no_name_does(tmp_path):
    kubelet_volume(tmp_path, "1", {"a.yaml": "one: 1\n"})
    assert [path.name for path in policy_files(tmp_path)] == ["a.yaml"]
    before = signature([tmp_path])
    kubelet_volume(tmp_path, "2", {"a.yaml": "one: 1\n"})
    assert signature([tmp_path]) != before
    assert read_policies(tmp_path) == [(str(tmp_path / "a.yaml"), "one: 1\n")]


def test_a_resolv_conf_behind_a_link_is_watched_at_its_real_place(tmp_path):
    real, link = tmp_path / "stub-resolv.conf", tmp_path / "resolv.conf"
    real.write_text("nameserver 192.0.2.1\n")
    link.symlink_to(real)
    before = signature([link])
    replace(real, "nameserver 192.0.2.2\n")
    assert signature([link]) != before


async def test_each_change_is_yielded_once(tmp_path):
    watching = changes(lambda: [tmp_path], signature([tmp_path]), interval=0.001)
    (tmp_path / "a.yaml").write_text("one: 1\n")
    first = await anext(watching)
    assert first == signature([tmp_path])
    (tmp_path / "b.yaml").write_text("two: 2\n")
    second = await anext(watching)
    assert second == signature([tmp_path]) != first
    await watching.aclose()


async def test_a_change_between_reading_and_watching_is_not_lost(tmp_path):
    seen = signature([tmp_path])
    (tmp_path / "a.yaml").write_text("one: 1\n")
    watching = changes(lambda: [tmp_path], seen, interval=0.001)
    assert await anext(watching) == signature([tmp_path])
    await watching.aclose()


async def test_a_file_that_is_still_being_written_waits_until_it_rests(tmp_path):
    """Every look finds another file until the writer is done; only the finished one is reported."""
    path = tmp_path / "a.yaml"
    looks = iter(range(30))

    class Folder(type(tmp_path)):
        """A path that a writer adds a line to whenever somebody looks at it."""

        def __fspath__(self):
            if next(looks, None) is not None:
                with path.open("a") as file:
                    file.write("- line\n")
            return super().__fspath__()

    before = signature([tmp_path])
    watching = changes(lambda: [Folder(tmp_path)], before, interval=0.001)
    await anext(watching)
    assert path.read_text().count("line") == 30
    await watching.aclose()


def refusal(read, path):
    with pytest.raises(DocumentError) as caught:
        read(path)
    return str(caught.value)


def test_a_folder_without_policies_is_no_policy(tmp_path):
    (tmp_path / "README").write_text("nothing here")
    assert refusal(read_policies, tmp_path).startswith(f"{tmp_path}: holds no *.yaml file")


@pytest.mark.parametrize("text", ["", " \n\n"])
def test_a_file_without_a_word_is_no_policy(tmp_path, text):
    (tmp_path / "a.yaml").write_text("# says that it says nothing\n")
    assert len(read_policies(tmp_path)) == 1
    (tmp_path / "b.yaml").write_text(text)
    assert refusal(read_policies, tmp_path).startswith(f"{tmp_path}/b.yaml: is empty")


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "a.yaml")
    assert "is not a regular file" in refusal(read_policies, tmp_path)


@pytest.mark.parametrize("name", ["x" * 300, "loop"])
def test_a_link_that_leads_nowhere_is_one_message(tmp_path, name):
    (tmp_path / "a.yaml").symlink_to(name if name != "loop" else "a.yaml")
    assert f"{tmp_path}/a.yaml: cannot be read" in refusal(read_policies, tmp_path)
    assert signature([tmp_path])


async def test_the_more_a_look_costs_the_rarer_it_is(monkeypatch):
    pauses, looks = [], iter([("a", 0.002), ("a", 0.05), ("b", 0.05), ("b", 0.05), ("c", 0.0)])

    async def sleep(seconds):
        pauses.append(round(seconds, 6))

    monkeypatch.setattr("dnsproxy.files.asyncio.sleep", sleep)
    monkeypatch.setattr("dnsproxy.files._look", lambda paths: next(looks))
    watching = changes(list, "a")
    assert await anext(watching) == "b"
    await watching.aclose()
    assert pauses == [1.0, 1.0, 5.0, 0.5]


def test_a_look_knows_what_it_cost(tmp_path):
    found, cost = _look([tmp_path])
    assert found == signature([tmp_path])
    assert cost > 0


@pytest.mark.parametrize("excess", [0, 1])
def test_a_file_may_be_so_large(tmp_path, monkeypatch, excess):
    monkeypatch.setattr("dnsproxy.files.LARGEST", 1 << 20)
    (tmp_path / "a.yaml").write_bytes(b"#" * ((1 << 20) + excess))
    if excess:
        assert refusal(read_policies, tmp_path) == (
            f"{tmp_path}/a.yaml: is larger than 1 MiB: is it the right file? Divide it if so"
        )
    else:
        assert len(read_text(tmp_path / "a.yaml")) == 1 << 20


def test_a_file_without_end_is_not_read_to_its_end(tmp_path, monkeypatch):
    monkeypatch.setattr("dnsproxy.files.LARGEST", 1 << 20)
    with (tmp_path / "a.yaml").open("wb") as file:
        file.truncate(1 << 40)  # a hole
    assert "is larger than 1 MiB" in refusal(read_text, tmp_path / "a.yaml")


def test_files_may_be_so_large_together(tmp_path, monkeypatch):
    monkeypatch.setattr("dnsproxy.files.TOGETHER", 1 << 20)
    for name in ("a", "b"):
        (tmp_path / f"{name}.yaml").write_bytes(b"#" * (1 << 19))
    assert len(read_policies(tmp_path)) == 2
    (tmp_path / "c.yaml").write_text("#")
    assert refusal(read_policies, tmp_path).startswith(f"{tmp_path}/c.yaml: goes beyond 1 MiB")
    assert refusal(read_paths, [tmp_path]).startswith(f"{tmp_path}/c.yaml: goes beyond 1 MiB")


def test_lines_end_as_they_end_elsewhere(tmp_path):
    (tmp_path / "a.yaml").write_bytes(b"a: 1\r\nb: 2\r")
    assert read_text(tmp_path / "a.yaml") == "a: 1\nb: 2\n"


def test_a_folder_within_a_folder_is_no_policy_whatever_its_name(tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    before = signature([tmp_path])
    (tmp_path / "folder.yaml" / "file").write_text("")
    assert signature([tmp_path]) == before
