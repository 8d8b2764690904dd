from __future__ import annotations

from pathlib import Path

from asyncrl.telemetry.live.tails import PIECE_BYTES, PoolWords, marked


def test_what_the_pool_marked_is_told_once_and_whole_among_what_ray_writes(tmp_path: Path) -> None:
    log = tmp_path / "rollout.log"
    words = PoolWords(tmp_path)
    assert words.news() == []
    died = marked("worker w died\nRestart 1")
    log.write_text(f"(raylet) state dump\n{died}\npool: half")
    assert words.news() == ["worker w died", "Restart 1"]
    with log.open("a") as file:
        file.write(" and half\n" + "x" * (2 * PIECE_BYTES) + "\n" + marked("after") + "\n")
    assert [line for _ in range(4) for line in words.news()] == ["half and half", "after"]
    assert PoolWords(tmp_path).news() == [], "what was there before is no news"
