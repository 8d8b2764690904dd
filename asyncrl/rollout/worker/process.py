"""The process around a worker, the same under every host: log file, threads, signals, exit code.

0  stopped by the server      1  failed, or ended by a signal: restart      2  refused: a restart cannot help
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from asyncrl.checks.placement import gpus_seen
from asyncrl.config import begin_trace, config_from_dict
from asyncrl.errors import (
    ConfigError,
    DataError,
    FencedError,
    HopelessFilterError,
    HopelessRewardError,
    HopelessRunError,
    ModelMismatchError,
    OtherVersionError,
    RefusedPeerError,
)
from asyncrl.plain_text import make_streams_plain
from asyncrl.replay.net.malloc import keep_heap
from asyncrl.rollout.host import EXIT_FAILED, EXIT_REFUSED, EXIT_STOPPED, WorkerSpec
from asyncrl.rollout.worker.watchdog import EndWatch
from asyncrl.rollout.worker.wiring import run_worker
from asyncrl.schema import Config
from asyncrl.storage.full_disk import FULL
from asyncrl.storage.log_stream import keep_logging, redirect_streams
from asyncrl.storage.occupancy import lived_in
from asyncrl.utils.stopped_processes import watched_supervisors

REFUSALS = (
    ConfigError,
    DataError,
    FencedError,
    HopelessFilterError,
    HopelessRewardError,
    HopelessRunError,
    ModelMismatchError,
    OtherVersionError,
    RefusedPeerError,
)
"""Errors for which a restart cannot help."""
SWITCH_S = 0.0005
"""Python's switch interval in seconds: how long a thread waits for another to release the lock. With the default of 5
ms, the engine's thread, which releases it in every call of torch, would wait that long after each."""


def run_worker_process(spec: WorkerSpec) -> int:
    """Run one worker to its end in this process, whose output goes to the worker's log from now on."""
    redirect_output(Path(spec.log_path))
    make_streams_plain()  # a Ray actor was not started by our own `__main__`
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    keep_heap()  # finished groups are built in it, tens of MB/s
    sys.setswitchinterval(SWITCH_S)
    ending = EndWatch()
    print(
        f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} {spec.name} pid {os.getpid()} start {spec.restart}{gpus_seen()}",
        flush=True,
    )
    try:
        config = config_from_dict(spec.config)
        begin_trace(config, spec.name)
        torch.set_num_threads(config.engine.threads)
        # Ray installs uvloop if available; a worker has the same loop under every host.
        asyncio.set_event_loop_policy(asyncio.DefaultEventLoopPolicy())
        with lived_in(config.run.dir), watched_supervisors():
            asyncio.run(_run_until_signal(config, spec, ending))
    except asyncio.CancelledError:
        # Not EXIT_STOPPED: if the pool sent the signal, it is closing and ignores the code; from anyone else (a node
        # being drained, a memory guard) the worker would silently be lost for the rest of the run.
        print("ended by a signal", flush=True)
        return EXIT_FAILED
    except REFUSALS as error:
        print(f"{type(error).__name__}: {error}", flush=True)
        return EXIT_REFUSED
    except SystemExit:
        # `sys.exit` in a task that an environment started; its code could look like a stop, or a refusal.
        traceback.print_exc()
        return EXIT_FAILED
    except Exception as error:  # the end of the process: the full traceback goes to the log, the exit code to the pool
        traceback.print_exc()
        print(f"{type(error).__name__}: {error}", flush=True)
        return EXIT_FAILED
    finally:
        ending.over()
    return EXIT_STOPPED


async def _run_until_signal(config: Config, spec: WorkerSpec, ending: EndWatch) -> None:
    loop = asyncio.get_running_loop()
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    await run_worker(config, spec.name, spec.run_digest, ending)


def redirect_output(path: Path) -> None:
    """Append the standard output and error of this process, including C libraries and children, to `path`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    except OSError as error:
        if error.errno not in FULL:
            raise
        print(f"{path}: {error.strerror}; this worker logs here", flush=True)  # rather than not at all
        keep_logging()
    else:
        redirect_streams(descriptor)
        os.close(descriptor)
