"""The launchers for clusters with fake commands of Slurm and Ray: what they would start, and how they end."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tomllib
from pathlib import Path

import jsonschema
import pytest
import ray
import yaml

from asyncrl.config import load_config
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[1]
SBATCH = ROOT / "launchers" / "slurm" / "asyncrl.sbatch"
WAIT_S = 120.0

SRUN = """#!/usr/bin/env bash
# Every task at once, here; the options come first and all have a `=` or no value.
echo "$*" >>"$SPOKEN/srun"
nodes=""
while [[ "$1" == --* ]]; do [[ "$1" != --nodelist=* ]] || nodes="${1#--nodelist=}"; shift; done
trap 'kill $(jobs -p) 2>/dev/null' TERM
node=0
for _ in ${nodes//,/ }; do SLURM_NODEID="$node" "$@" & node=$((node + 1)); done
code=0
for job in $(jobs -p); do wait "$job" || code=$?; done
exit "$code"
"""
SCONTROL = """#!/usr/bin/env bash
[ "$1 $2" = "show hostnames" ] && tr , '\\n' <<<"$3"
"""
GETENT = """#!/usr/bin/env bash
echo "10.0.0.${2#node} STREAM $2"
"""
RAY = """#!/usr/bin/env bash
echo "ray $*" >>"$SPOKEN/started"
[ "$1" = status ] || exec sleep 300
"""
PYTHON = """#!/usr/bin/env bash
# In the place of every role. A learner ends when it is told to, by the test or by the file in the run folder.
echo "$NODE_RANK:$NNODES:$NPROC_PER_NODE $*" >>"$SPOKEN/started"
case "$*" in
*asyncrl.cli*) mkdir -p "${@: -1}" ;;
*asyncrl.learner*) until [ -e "$SPOKEN/end" ] || [ -e "$RUN_DIR/logs/stop" ]; do sleep 0.05; done
    [ ! -e "$SPOKEN/end" ] || exit 7 ;;
*rollout.py*) until [ -e "$SPOKEN/end-pool" ]; do sleep 0.05; done; exit 2 ;;
*) exec sleep 300 ;;
esac
"""


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a job, with the fakes first on its PATH."""
    commands = tmp_path / "bin"
    commands.mkdir()
    fakes = {"srun": SRUN, "scontrol": SCONTROL, "getent": GETENT, "ray": RAY, "python": PYTHON}
    for name, text in fakes.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    return {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "PYTHON": str(commands / "python"),
        "SPOKEN": str(tmp_path),
        "RUN_DIR": str(tmp_path / "run"),
        "ASYNCRL_ROOT": str(ROOT),
        "SLURM_JOB_ID": "41",
        "SLURM_JOB_NODELIST": "node1,node2,node3,node4",
        "SLURM_GPUS_ON_NODE": "8",
    }


def plan(environment: dict[str, str], *settings: str) -> list[str]:
    done = subprocess.run(
        ["bash", str(SBATCH), *settings], env=environment | {"DRY_RUN": "1"}, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_job_of_slurm_says_what_it_would_start_on_which_node(cluster: dict[str, str]) -> None:
    replay, head, workers, pool, learner = plan(cluster, "model.path=m with spaces", "data.path=d.jsonl")
    for line, nodes, count in (
        (replay, "node1", 1),
        (head, "node2", 1),
        (workers, "node3,node4", 2),
        (pool, "node2", 1),
        (learner, "node1", 1),
    ):
        where = nodes.replace(",", r"\,")
        assert line.startswith(
            f"srun --overlap --kill-on-bad-exit=1 --nodes={count} --ntasks={count} --nodelist={where} "
        )
    settings = rf"run.dir={cluster['RUN_DIR']} replay.address=tcp://10.0.0.1:20041 "
    for line in (replay, pool, learner):
        assert settings in line and "weights.host=10.0.0.1" in line and r"model.path=m\ with\ spaces" in line
    assert "launchers/replay.sh" in replay and "launchers/rollout.py" in pool and "launchers/learner.sh" in learner
    assert r"--node-ip-address=10.0.0.2\ --port=20042" in head
    assert workers.endswith(" 10.0.0.2:20042 ") and "ray\\ start\\ --address" in workers
    assert "ray.address=10.0.0.2:20042" in pool
    assert not Path(cluster["RUN_DIR"]).exists()


def test_the_settings_of_a_job_are_settings(cluster: dict[str, str]) -> None:
    line = plan(cluster)[3]
    given = [word for word in line.split() if re.fullmatch(r"[a-z_.]+=\S+", word)]
    config = load_config([*given, "model.path=m", "data.path=d.jsonl", "reward.function=r.py:f"])
    assert config.placement.mode == "dedicated" and config.replay.keys.endswith("/run/keys")


def test_a_job_that_slurm_starts_again_goes_on_and_deletes_nothing(cluster: dict[str, str]) -> None:
    again = cluster | {"SLURM_RESTART_COUNT": "1"}

    def begun(environment: dict[str, str], *settings: str) -> list[str]:
        return re.findall(r"(?<= )(?:resume|overwrite|seed)=\S+", plan(environment, *settings)[-1])

    assert begun(cluster, "overwrite=true", "seed=3") == ["overwrite=true", "seed=3"]
    assert begun(again, "overwrite=true", "seed=3") == ["seed=3", "resume=auto"]
    assert begun(again, "resume=/runs/old/ckpt/step_5") == ["resume=/runs/old/ckpt/step_5"]
    (Path(cluster["RUN_DIR"]) / "ckpt" / "latest").mkdir(parents=True)
    assert begun(again, "resume=/runs/old/ckpt/step_5") == ["resume=auto"]


def test_a_folder_of_any_name_is_the_run_s(cluster: dict[str, str]) -> None:
    folder = "/my runs/it's 1,5 [a]={b} \"ü"
    replay, _, _, pool, learner = plan(cluster | {"RUN_DIR": folder})
    for line in (replay, pool, learner):
        words = subprocess.check_output(["bash", "-c", f"printf '%s\\n' {line}"], text=True).splitlines()
        given = [word for word in words if re.match(r"(run\.dir|replay\.keys)=", word)]
        config = load_config([*given, "model.path=m", "data.path=d.jsonl", "reward.function=r.py:f"])
        assert (config.run.dir, config.replay.keys) == (folder, f"{folder}/keys")


@pytest.mark.parametrize(
    ("node", "address", "told"),
    [
        ("node1", "", "node node1 has no known IPv4 address here. Set HEAD_ADDRESS to one"),
        ("node1", "127.0.1.1", "node node1 is 127.0.1.1 here (/etc/hosts)"),
        ("node2", "127.0.1.1", "Set RAY_ADDRESS (with :20042) to an address that they can reach"),
    ],
)
def test_nodes_that_the_others_would_not_find_are_refused(
    cluster: dict[str, str], node: str, address: str, told: str
) -> None:
    said = f"echo '{address} STREAM'" if address else "exit 2"
    fake = GETENT.replace("\n", f'\n[ "$2" != {node} ] || {{ {said}; exit; }}\n', 1)
    (Path(cluster["SPOKEN"]) / "bin" / "getent").write_text(fake)
    done = subprocess.run(["bash", str(SBATCH)], env=cluster, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stdout == ""
    assert told in done.stderr
    assert not started(cluster)


def test_a_job_submitted_from_elsewhere_than_a_checkout_is_refused(cluster: dict[str, str], tmp_path: Path) -> None:
    elsewhere = {name: value for name, value in cluster.items() if name != "ASYNCRL_ROOT"}
    for environment in (elsewhere | {"SLURM_SUBMIT_DIR": str(tmp_path)}, cluster | {"ASYNCRL_ROOT": str(tmp_path)}):
        done = subprocess.run(["bash", str(SBATCH)], env=environment, capture_output=True, text=True, timeout=60)
        assert (done.returncode, done.stdout) == (2, "")
        assert f"{tmp_path} is no checkout of asyncrl. Submit from one, or set ASYNCRL_ROOT" in done.stderr
    assert not started(cluster) and not Path(cluster["RUN_DIR"]).exists()


def test_the_ray_that_is_started_is_the_one_beside_the_interpreter(cluster: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "venv").mkdir()
    for name in ("ray", "python"):
        (tmp_path / "bin" / name).rename(tmp_path / "venv" / name)
    job = subprocess.Popen(
        ["bash", str(SBATCH)], env=cluster | {"PYTHON": str(tmp_path / "venv" / "python")}, start_new_session=True
    )
    try:
        until(
            lambda: any(line.startswith("ray start --head") for line in started(cluster)),
            lambda: started(cluster),
            within_s=WAIT_S,
            holds=lambda: job.poll() is None,
        )
    finally:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()


def test_several_nodes_learn_where_that_is_asked_for_and_one_must_be_left(cluster: dict[str, str]) -> None:
    learner = plan(cluster | {"LEARNER_NODES": "2"})[-1]
    assert "--nodes=2" in learner and r"--nodelist=node1\,node2" in learner
    refused = subprocess.run(
        ["bash", str(SBATCH)], env=cluster | {"LEARNER_NODES": "4"}, capture_output=True, text=True, timeout=60
    )
    assert refused.returncode == 2
    assert "LEARNER_NODES=4 of 4 node(s) leaves no node for the rollouts" in refused.stderr


def test_without_slurms_own_command_a_plan_says_that_and_nothing_of_nodes(cluster: dict[str, str]) -> None:
    broken = Path(cluster["SPOKEN"]) / "bin" / "scontrol"
    broken.write_text("#!/bin/sh\necho scontrol: no such job >&2\nexit 1\n")
    done = subprocess.run(
        ["bash", str(SBATCH)], env=cluster | {"DRY_RUN": "1"}, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "scontrol: no such job\n")


def started(environment: dict[str, str]) -> list[str]:
    path = Path(environment["SPOKEN"]) / "started"
    return path.read_text().splitlines() if path.exists() else []


@pytest.mark.parametrize("how", ["the learner fails", "Slurm sends TERM", "the pool fails"])
def test_a_job_ends_with_its_learner_and_by_a_checkpoint_when_its_time_is_over(
    cluster: dict[str, str], how: str
) -> None:
    job = subprocess.Popen(
        ["bash", str(SBATCH), "seed=3"], env=cluster | {"LEARNER_NODES": "2"}, start_new_session=True
    )
    try:
        # keys, replay, Ray's head and worker, its status twice, the pool, two learners
        until(
            lambda: len(started(cluster)) >= 9,
            lambda: started(cluster),
            within_s=WAIT_S,
            holds=lambda: job.poll() is None,
        )
        told = {"the learner fails": "end", "the pool fails": "end-pool"}
        if how in told:
            (Path(cluster["SPOKEN"]) / told[how]).touch()
        else:
            job.terminate()
        assert job.wait(WAIT_S) == {"the learner fails": 7, "Slurm sends TERM": 0, "the pool fails": 1}[how]
    finally:
        if job.poll() is None:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    said = started(cluster)
    assert sorted(line.split()[0] for line in said if "-m asyncrl.learner " in line) == ["0:2:8", "1:2:8"]
    assert all("--rdzv-endpoint=10.0.0.1:20043" in line for line in said if "-m asyncrl.learner " in line)
    token = Path(cluster["RUN_DIR"]) / "keys" / "ray_token"
    assert len(token.read_text()) == 64 and token.stat().st_mode & 0o077 == 0
    until(lambda: not _of_group(job.pid), "the others were not told to end", within_s=WAIT_S)


def _of_group(group: int) -> list[str]:
    """Processes of it that have not ended, by name."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = path.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        state, _, of = rest.split()[:3]
        if int(of) == group and state != "Z":
            found.append(name)
    return found


def test_the_ray_cluster_is_one_to_ray_and_starts_no_dashboard_for_others() -> None:
    config = yaml.safe_load((ROOT / "launchers" / "ray_cluster.yaml").read_text())
    schema = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
    jsonschema.validate(config, json.loads(schema.read_text()))
    (head,) = [line for line in config["head_start_ray_commands"] if "--head" in line]
    assert "--dashboard-host=127.0.0.1" in head and "RAY_enable_autoscaler_v2=0" in head
    commands = [*config["head_start_ray_commands"], *config["worker_start_ray_commands"]]
    assert all("ENVIRONMENT/bin/ray" in line for line in commands), "commands over ssh have no environment of Python"
    assert len(config["provider"]["worker_ips"]) == config["max_workers"]


def test_the_container_installs_extras_that_there_are_with_the_versions_that_are_tested() -> None:
    text = (ROOT / "launchers" / "Containerfile").read_text()
    known = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    named = re.findall(r"EXTRAS=([\w,]+)", text)
    assert len(named) == 2 and {extra for each in named for extra in each.split(",")} <= set(known)
    assert "-c constraints.txt" in text and re.search(r"^USER (?!root)", text, re.MULTILINE)


def test_the_container_gets_what_the_package_is_made_of_and_no_keys_runs_or_environments() -> None:
    text = (ROOT / "launchers" / "Containerfile").read_text()
    copied = [
        name for names in re.findall(r"^COPY --chown=\w+ (.+) \S+$", text, re.MULTILINE) for name in names.split()
    ]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    made_of = [project["project"]["readme"], *project["project"]["license-files"], *wheel["packages"]]
    assert sorted(copied) == sorted(
        ["pyproject.toml", "constraints.txt", "launchers", *made_of, *wheel["force-include"]]
    )


def test_the_replay_s_launcher_plans_instead_of_starting_where_it_is_asked_to() -> None:
    for order in (["replay.window=4", "--dry-run"], ["--dry-run", "replay.window=4"]):
        said = subprocess.run(
            ["bash", str(ROOT / "launchers" / "replay.sh"), *order],
            env={"PATH": os.environ["PATH"], "PYTHON": "echo"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert said.stdout == f"-m asyncrl replay {' '.join(order)}\n"


def test_each_start_is_a_run_of_its_own_and_machines_that_join_find_the_others_by_a_name(tmp_path: Path) -> None:
    told = tmp_path / "python"
    told.write_text('#!/usr/bin/env bash\nprintf "%s\\n" "$@"\n')
    told.chmod(0o755)

    def named(**environment: str) -> str:
        command = ["bash", str(ROOT / "launchers" / "learner.sh"), "run.name=x"]
        known = os.environ | {"PYTHON": str(told), "RUN_ID": "mine"} | environment
        said = subprocess.check_output(command, env=known, text=True, timeout=WAIT_S).splitlines()
        return next(line.removeprefix("--rdzv-id=") for line in said if line.startswith("--rdzv-id="))

    first, second = named(), named()
    assert first != second and first.startswith("mine-") and second.startswith("mine-")
    two = {"NNODES": "2", "NODE_RANK": "1", "RDZV_ENDPOINT": "10.0.0.6:29400"}
    assert named(**two).startswith("mine-") and named(**two, RUN_ID="").startswith("run-")
    assert named(**two, RDZV_BACKEND="c10d") == "mine"
    with pytest.raises(subprocess.CalledProcessError):
        named(**two, RDZV_BACKEND="c10d", RUN_ID="")
