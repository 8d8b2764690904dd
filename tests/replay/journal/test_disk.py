"""The real folder behind the journal."""

from __future__ import annotations

from pathlib import Path

import pytest

from asyncrl.cli.starting.folder_check import journal_end
from asyncrl.errors import JournalError
from asyncrl.replay.journal.direct import MAX_BUFFERS
from asyncrl.replay.journal.disk import KEPT_OPEN, FolderDisk
from asyncrl.replay.journal.durable import recover
from asyncrl.replay.journal.recovery import read_journal
from asyncrl.replay.journal.sync_thread import SyncThread
from asyncrl.replay.serving import discard
from tests.replay.journal.test_log import Life, same


def test_a_gathered_write_of_any_number_of_buffers_lands_whole(tmp_path: Path) -> None:
    disk = FolderDisk(tmp_path / "j", locked=True)
    disk.create("a", 64)
    pieces = [bytes([n % 251]) * (n % 5) for n in range(3 * MAX_BUFFERS)]
    disk.write("a", 16, pieces)
    disk.sync("a")
    content = b"".join(pieces)
    assert disk.read("a", 16, len(content)) == content
    disk.truncate("a", 16 + len(content))
    disk.rename("a", "b")
    disk.write("b", 0, [b"xy"])
    assert disk.names() == ["b"] and disk.read("b", 0, 2) == b"xy"
    disk.close()


def test_a_file_that_the_system_hands_out_in_parts_is_read_whole() -> None:
    """As it does with one of more than 2 GiB; of these it gives a page at a time."""
    disk = FolderDisk(Path("/proc/self"), locked=False)
    assert len(disk.read("smaps", 0, 1 << 24)) > 4 * 4096


def test_what_is_written_beyond_the_end_of_a_file_stands_where_it_was_put(tmp_path: Path) -> None:
    disk = FolderDisk(tmp_path, locked=True)
    disk.create("a", 64)
    disk.write("a", 5000, [b"far"])
    assert disk.read("a", 0, 5003) == bytes(5000) + b"far"
    disk.close()


def test_a_journal_of_many_segments_holds_few_of_them_open(tmp_path: Path) -> None:
    disk = FolderDisk(tmp_path / "j", locked=True)
    for number in range(5 * KEPT_OPEN):
        disk.create(f"{number}", 16)
        disk.write(f"{number}", 0, [b"x"])
    disk.write("0", 1, [b"y"])
    disk.sync("0")
    assert len(disk._open) <= KEPT_OPEN
    assert disk.read("0", 0, 2) == b"xy"
    disk.close()


def test_no_other_user_reads_what_is_written_and_what_all_could_read_is_closed_to_them(
    tmp_path: Path,
) -> None:
    old = tmp_path / "j"
    old.mkdir()
    for name, mode in (("spare", 0o644), ("shared", 0o640)):
        (old / name).write_bytes(b"x")
        (old / name).chmod(mode)
    disk = FolderDisk(old, locked=True)
    disk.create("new", 16)
    disk.rename("spare", "again")
    modes = {name: (old / name).stat().st_mode & 0o777 for name in disk.names()}
    assert modes == {"new": 0o600, "again": 0o640, "shared": 0o640}
    disk.close()


def test_two_servers_never_write_one_journal(tmp_path: Path) -> None:
    first = FolderDisk(tmp_path, locked=True)
    with pytest.raises(JournalError, match=r"is being written by another replay server. Stop that one"):
        FolderDisk(tmp_path, locked=True)
    first.close()
    FolderDisk(tmp_path, locked=True).close()


def test_a_journal_in_a_folder_is_recovered_read_and_discarded(tmp_path: Path) -> None:
    disk = FolderDisk(tmp_path, locked=True)
    server = Life(disk, retain="all")  # type: ignore[arg-type]
    sync = SyncThread(server.journal, 0.001)
    server.begin()
    for _ in range(40):
        server.act()
        sync.nudge()
        sync.heard()
    sync.stop()
    disk = FolderDisk(tmp_path, locked=True)
    found = recover(disk)
    assert found is not None
    same(found.state, server.core.state)
    assert [event for _, event in read_journal(tmp_path)][1:] == server.events
    discard(disk)
    assert recover(disk) is None and disk.names() == []
    disk.close()


def test_who_may_only_read_a_journal_learns_how_far_it_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FolderDisk(tmp_path, locked=True)
    server = Life(disk)  # type: ignore[arg-type]
    server.begin()
    server.journal.close()

    def refused(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(FolderDisk, "_descriptor", refused)  # opened for writing
    end = journal_end(tmp_path, [])
    assert end is not None and end.events == server.core.state.applied


def test_readers_say_when_there_is_no_journal(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="this run has no journal"):
        list(read_journal(tmp_path / "none"))
    with pytest.raises(JournalError, match="holds no finished record"):
        list(read_journal(tmp_path))
