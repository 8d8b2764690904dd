"""How much memory is free."""

from __future__ import annotations

from pathlib import Path

from asyncrl.storage.memory import free_share


def test_the_smaller_of_machine_and_container_counts(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    cgroup.mkdir()
    assert free_share(meminfo, cgroup) is None
    meminfo.write_text("MemTotal:       1000 kB\nMemFree:         10 kB\nMemAvailable:    600 kB\n")
    assert free_share(meminfo, cgroup) == 0.6
    (cgroup / "memory.max").write_text("max\n")
    assert free_share(meminfo, cgroup) == 0.6, "no limit"
    (cgroup / "memory.max").write_text("1000\n")
    (cgroup / "memory.current").write_text("900\n")
    (cgroup / "memory.stat").write_text("anon 700\ninactive_file 100\nactive_file 50\n")
    assert free_share(meminfo, cgroup) == 0.25
    assert 0 < (free_share() or 1) <= 1
