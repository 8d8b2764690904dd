from __future__ import annotations

from pathlib import Path

from asyncrl.replay.client import connection
from asyncrl.rollout.pool.relay import EVERY_S, MARK, Relay
from asyncrl.telemetry.live.tails import PIECE_BYTES

SILENT = "2026-01-01 00:00:00,000 WARNING asyncrl.replay.client.connection: no word from the replay server for 9 s{}\n"


def test_what_a_worker_logs_of_a_server_that_does_not_answer_is_on_the_terminal_once_a_minute(tmp_path: Path) -> None:
    """With a wrong CURVE key `asyncrl rollout` said nothing for minutes; only the worker's log did."""
    assert f" WARNING {connection.__name__}: " == MARK
    now, said = [0.0], list[str]()
    relay = Relay(said.append, clock=lambda: now[0])
    log = tmp_path / "rollout-0.log"
    log.write_text(SILENT.format("; of the worker before it"))
    relay.begin("rollout-0", str(log))
    relay.begin("elsewhere", "/nowhere/worker.log")
    relay.look()
    assert said == []
    with log.open("a") as file:
        file.write("a line of another kind\n" + SILENT.format("; who listens there has other keys") + "half a li")
        file.flush()
        relay.look()
        assert said == ["worker rollout-0: no word from the replay server for 9 s; who listens there has other keys"]
        file.write("ne\n" + SILENT.format(""))
        file.flush()
        relay.look()
        assert len(said) == 1
        now[0] = EVERY_S
        file.write(SILENT.format(" again") + "x" * 2 * PIECE_BYTES)
        file.flush()
        relay.look()
        assert said[1:] == ["worker rollout-0: no word from the replay server for 9 s again"]
        file.write("\n" + SILENT.format(" later"))
        file.flush()
        now[0] *= 2
        for _ in range(4):
            relay.look()
        assert said[2:] == ["worker rollout-0: no word from the replay server for 9 s later"]
    log.unlink()
    relay.look()
