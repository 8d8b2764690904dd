"""Run two Ray nodes on this machine, with a worker on the node that its pool is not on. It needs a process of its own,
because Ray reads the addresses to listen at when it is imported.

    python -m tests.rollout.pool.two_nodes FOLDER       prints what was refused and how the worker ended, as JSON
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from ray.cluster_utils import Cluster

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.quickstart.byte_tokenizer import save_byte_tokenizer
from asyncrl.replay.net.keyring import with_keys
from asyncrl.rollout.host import WorkerExit
from asyncrl.rollout.pool.nodes import refuse_lacking_nodes
from asyncrl.rollout.pool.ray_host import RayHost, make_host
from asyncrl.rollout.pool.specs import worker_specs
from asyncrl.schema import Config
from asyncrl.storage.held import PREFIX

WAIT_S = 300.0
ENVIRONMENT = """
import os, signal, time
from near import word


def end(*_):
    print("asked to end", flush=True)
    os._exit(1)


print(word, os.environ["NCCL_OURS"], os.environ["MY_OWN"], __file__, flush=True)
if not os.path.exists({second!r}):
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, end)
print("waits", flush=True)
time.sleep(600)
"""


def settings(folder: Path, address: str) -> Config:
    code = folder / "code"
    code.mkdir()
    (code / "mine.py").write_text(ENVIRONMENT.format(second=str(folder / "second")))
    (code / "near.py").write_text("word = 'from beside'\n")
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "qwen2"}')
    save_byte_tokenizer(folder / "model")
    given = {
        "model.path": folder / "model", "data.path": folder / "rows.jsonl", "environment.name": f"{code}/mine.py:Mine",
        "engine": "fake", "run.dir": folder / "run", "rollout.workers": 1, "ray.address": address,
        "ray.gpus_per_worker": 1, "ray.environment": "[MY_OWN]",
    }  # fmt: skip
    return with_keys(load_config([f"{key}={value}" for key, value in given.items()]))


def first_end(host: RayHost) -> WorkerExit:
    deadline = time.monotonic() + WAIT_S
    while not (ended := host.wait(0.5)):
        assert time.monotonic() < deadline, "the worker neither ran nor ended"
    return ended[0]


def refused(paths: dict[str, str]) -> str:
    try:
        refuse_lacking_nodes(paths, 0.0)
    except ConfigError as error:
        return str(error)
    return ""


def story(folder: Path, address: str) -> dict[str, object]:
    config = settings(folder, address)
    host = make_host(config)
    try:
        said = refused({str(folder / "rows.jsonl"): "data.path", "/not/here": "model.path"})
        shutil.rmtree(folder / "code")
        (spec,) = worker_specs(config)
        host.start(spec)
        ended = first_end(host)
        left = [str(found) for found in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/code{folder}")]
        (folder / "second").touch()
        host.start(spec)
        deadline = time.monotonic() + WAIT_S
        while "waits\n" not in Path(spec.log_path).read_text():
            assert time.monotonic() < deadline and not host.wait(0.5), "the second worker did not start"
    finally:
        host.close()
    return {"refused": said, "left": left, **asdict(ended), "whole_log": Path(spec.log_path).read_text()}


def main() -> None:
    cluster = Cluster()
    try:
        for gpus in (0, 1):  # a worker asks for one, and this process is on the first node
            cluster.add_node(
                num_cpus=1, num_gpus=gpus, object_store_memory=80 << 20, include_dashboard=False,
                node_ip_address="127.0.0.1", wait=False,
            )  # fmt: skip
        cluster.wait_for_nodes(WAIT_S)
        os.environ.update(NCCL_OURS="of the pool", MY_OWN="by name")  # Ray's own processes do not have them
        print(json.dumps(story(Path(sys.argv[1]), cluster.address)), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
