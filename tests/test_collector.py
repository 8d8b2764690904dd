"""How processes of asyncrl begin: with the garbage collector at rest, and without modules that they do not need."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl import collector

PACKAGE = Path(collector.__file__).parent
HEAVY = {"torch", "transformers", "ray", "vllm", "matplotlib", "scipy", "pandas", "sklearn", "sympy", "openai"}


@pytest.fixture(autouse=True)
def _nothing_stays_frozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_the_collector_is_awake_after_an_import_and_after_one_that_failed(tmp_path: Path) -> None:
    resting = "import gc\nassert not gc.isenabled()\n"
    sys.path.insert(0, str(tmp_path))
    try:
        (tmp_path / "begins_well.py").write_text(resting)
        (tmp_path / "begins_badly.py").write_text(f"{resting}raise OSError('no')\n")
        assert collector.load("begins_well").__name__ == "begins_well"
        assert gc.isenabled() and gc.get_freeze_count() > 0
        with pytest.raises(OSError, match="no"):
            collector.load("begins_badly")
        assert gc.isenabled()
    finally:
        sys.path.remove(str(tmp_path))


def test_every_process_that_lets_the_collector_rest_wakes_it_before_anything_else() -> None:
    resting = [path for path in PACKAGE.rglob("*.py") if "    collector.rest()" in path.read_text()]
    assert len(resting) == 4
    for path in resting:
        head, _, begun = path.read_text().rpartition('if __name__ == "__main__":\n')
        assert head.count("collector.rest()") == 1, path
        if path == PACKAGE / "environments" / "verifiers" / "host.py":  # a taskset is imported while it is built
            assert "env = built(settings)\n        collector.wake()\n" in head
        else:
            assert begun.startswith("    collector.wake()\n"), path


def test_command_replay_server_pool_and_reward_process_begin_without_what_they_do_not_need() -> None:
    modules = "asyncrl.cli.local, asyncrl.replay.__main__, asyncrl.rollout.__main__, asyncrl.rewards.child"
    names = "{name.partition('.')[0] for name in sys.modules}"
    command = [sys.executable, "-c", f"import sys, {modules}; print(*{names})"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout.split()
    assert "asyncrl" in found and "zmq" in found
    assert not HEAVY & set(found)


def test_a_worker_renders_messages_without_openai_which_whoever_uses_it_finds() -> None:
    """Half a second of every start: `renderers` imports it for a client of its own."""
    code = (
        "import sys, asyncrl.chat.choice; begun = 'openai' in sys.modules;"
        "import openai; print(begun, openai.AsyncOpenAI.__module__)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=150, check=True).stdout
    begun, module = found.split()
    assert begun == "False" and module.startswith("openai")


def test_the_command_that_starts_a_run_begins_without_the_replay_server_and_without_what_asks_others() -> None:
    """A quarter of what it needs before anything is started: parts of `--dry-run`, of a resume and of engine=server."""
    code = "import sys, asyncrl.cli.quickstart; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout
    begun = set(found.split())
    assert "asyncrl.cli.local" in begun
    later = {"asyncrl.cli.dry_run", "asyncrl.cli.starting.folder_check", "asyncrl.replay.core"}
    assert not begun & (later | {"asyncrl.replay.journal", "asyncrl.replay.server", "httpx"})
