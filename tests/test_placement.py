"""Which process gets which GPU: every layout fits by the rules, or is refused with one that does."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl import placement as placements
from asyncrl.checks.placement import (
    gpus_per_engine,
    impossible_placement,
    misread_gpus,
    placement_of,
    visible_gpus,
    worker_gpus,
)
from asyncrl.checks.resources import missing_devices
from asyncrl.cli.processes.commands import Command, with_gpus
from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.learner.parallel.place import Place
from asyncrl.placement import Demand, Placement, blocks, engine_share, fits, nearest, place
from asyncrl.schema import Config
from asyncrl.sft.settings import SftConfig, SftDataConfig, SftLearnerConfig, learner_config

REQUIRED = ["model.path=m", "data.path=d.jsonl", "reward.function=r.py:score"]
LAYOUTS = st.fixed_dictionaries(
    {
        "placement.mode": st.sampled_from(["auto", "dedicated", "colocated"]),
        "learner.ranks": st.integers(1, 16),
        "learner.replicas": st.sampled_from([1, 1, 1, 2, 4]),
        "learner.device": st.sampled_from(["auto", "auto", "auto", "cpu", "cuda:0"]),
        "rollout.workers": st.integers(1, 16),
        "engine.device": st.sampled_from(["auto", "auto", "auto", "cpu"]),
    },
) | st.fixed_dictionaries({"learner.ranks": st.integers(1, 3), "rollout.workers": st.integers(1, 3)})
ENGINES = st.one_of(
    st.fixed_dictionaries({"rollout.host": st.just("process"), "engine.tensor_parallel": st.sampled_from([1, 2, 4])}),
    st.fixed_dictionaries(
        {"engine.tensor_parallel": st.sampled_from([1, 2, 4, 8])},
        optional={"reward.host": st.just("ray"), "reward.gpus": st.sampled_from([0.0, 0.5, 1.0, 2.0])},
    ),
    st.fixed_dictionaries(
        {"ray.gpus_per_worker": st.sampled_from([0.25, 0.3, 0.5, 1.0, 2.0])},
        optional={"reward.host": st.just("ray"), "reward.gpus": st.sampled_from([0.5, 1.0, 3.0])},
    ),
)
BASE = load_config(REQUIRED)


def with_settings(config: Config, changes: Mapping[str, object]) -> Config:
    for key, value in changes.items():
        group, name = key.split(".")
        of_group = getattr(config, group)
        kind = type(getattr(of_group, name))
        config = replace(config, **{group: replace(of_group, **{name: kind(value)})})
    return config


def check(config: Config, gpus: int) -> None:
    """Raises ConfigError if the layout is refused."""
    placement = placement_of(config, gpus)
    ranks = config.learner.ranks if config.learner.device == "auto" else 0
    engines = config.rollout.workers if config.engine.device == "auto" else 0
    assert len(placement.learner) == ranks and len(placement.engines) == engines
    used = [gpu for placed in placement for gpu in placed.gpus]
    assert all(0 <= gpu < gpus for gpu in used)
    assert len(placement.learner_gpus) == len(set(placement.learner_gpus))
    assert all(len(set(engine.gpus)) >= config.engine.tensor_parallel for engine in placement.engines)
    memory = [sum(placed.memory for placed in placement if gpu in placed.gpus) for gpu in range(gpus)]
    assert max(memory, default=0.0) <= 0.9 + 1e-9
    assert all(placed.memory > 0 for placed in (*placement.learner, *placement.engines))
    if placement.mode == "dedicated":
        assert not placement.shared
        assert len(used) == len(set(used)) or 0 < config.ray.gpus_per_worker < 1
    if engines and config.rollout.host == "ray":
        check_ray(config, placement)


def check_ray(config: Config, placement: Placement) -> None:
    """Ray, not the placement, decides on which of the pool's GPUs an engine is: any that has room must do."""
    pool, share = set(placement.rollout_gpus), gpus_per_engine(config, len(placement.rollout_gpus))
    on_one = min(int(1 / share + 1e-9), config.rollout.workers) if share < 1 else 1
    engines = math.ceil(config.rollout.workers / on_one) * math.ceil(share)
    rewards = math.ceil(config.reward.gpus) if config.reward.host == "ray" else 0
    assert engines + rewards <= len(pool)
    beside = max((rank.memory for rank in placement.learner if pool & set(rank.gpus)), default=0.0)
    assert on_one * placement.engine_memory + beside <= 0.9 + 1e-9


def ways_out(said: str) -> list[dict[str, str]]:
    ways = said.partition("The nearest setting that fits: ")[2].split(", or ")
    return [dict(re.findall(r"([a-z_]+\.[a-z_]+)=([\w.]+)", way)) for way in ways]


@settings(max_examples=1000, deadline=None)
@given(gpus=st.integers(1, 16), layout=LAYOUTS, engines=ENGINES)
def test_every_process_is_placed_or_refused_with_layouts_that_fit(gpus: int, layout: dict, engines: dict) -> None:
    config = with_settings(BASE, layout | engines)
    try:
        check(config, gpus)
    except ConfigError as error:
        said = str(error)
        assert f"GPUs, but there are {gpus}" in said and "\n" not in said
        ways = ways_out(said)
        assert all(ways), said
        for way in ways:
            check(with_settings(config, way), gpus)


def test_the_nearest_keeps_what_it_can() -> None:
    def said(gpus: int, **demand: float) -> str:
        with pytest.raises(ConfigError) as caught:
            place(gpus, Demand(**demand), "dedicated")
        return str(caught.value).partition("that fits: ")[2].split(", or ")[0]

    assert said(4, ranks=1, engines=20, reserved=0.25) == "learner.ranks=1 rollout.workers=12"
    assert said(8, ranks=8, ranks_step=4, engines=2) == "learner.ranks=4 rollout.workers=2"
    assert said(3, ranks=2, engines=1, tensor_parallel=2) == "learner.ranks=1 rollout.workers=1"
    assert (
        said(2, ranks=1, engines=1, tensor_parallel=2) == "learner.ranks=1 rollout.workers=1 engine.tensor_parallel=1"
    )
    assert said(2, ranks=1, engines=1, reserved=2) == "learner.ranks=1 rollout.workers=1 ray.gpus_per_worker=1"
    assert said(2, ranks=1, engines=1, rewards=1) == "learner.ranks=1 rollout.workers=1 reward.gpus=0"
    assert said(1, ranks=2, engines=2) == "learner.ranks=1 rollout.workers=1 placement.mode=colocated"
    unit = said(2, ranks=4, ranks_step=4, engines=1)
    assert unit == "learner.ranks=1 rollout.workers=1 with parallel settings of the learner that divide its ranks"


@given(
    st.integers(1, 12),
    st.integers(0, 14),
    st.sampled_from([1, 2, 3]),
    st.integers(0, 30),
    st.sampled_from([{"tensor_parallel": 1}, {"tensor_parallel": 2}, {"reserved": 0.25}, {"reserved": 0.4}]),
)
def test_no_layout_that_fits_is_nearer(gpus: int, ranks: int, step: int, engines: int, width: dict) -> None:
    wanted = Demand(ranks=ranks, ranks_step=step, engines=engines, **width)
    found = nearest(gpus, wanted, "dedicated")
    several = range(step, ranks + 1, step) if ranks else (0,)
    counts = range(1, engines + 1) if engines else (0,)
    all_of_them = [replace(wanted, ranks=one, engines=count) for one in several for count in counts]

    def distance(layout: Demand) -> tuple[int, float]:
        ratios = [each.engines / max(1, each.ranks) for each in (layout, wanted)]
        return gpus - layout.gpus("dedicated"), abs(ratios[0] - ratios[1])

    fitting = [layout for layout in all_of_them if fits(gpus, layout, "dedicated")]
    if fitting:
        assert found == (min(fitting, key=distance), "dedicated")
    elif found:
        assert found[0] not in all_of_them or found[1] == "colocated"


@pytest.mark.parametrize("mode", ["dedicated", "colocated"])
def test_the_nearest_is_found_without_trying_every_layout(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[Demand] = []
    monkeypatch.setattr(placements, "fits", lambda gpus, demand, mode: tried.append(demand) or fits(gpus, demand, mode))
    assert nearest(256, Demand(ranks=300, engines=300, tensor_parallel=2), mode)
    assert len(tried) < 256 * 10


def test_rewards_of_evaluated_sets_have_gpus_too() -> None:
    sets = "eval.sets={a: {path: a.jsonl, reward: other.py:score}, b: {path: b.jsonl, reward: other.py:score}}"
    given = ["reward.host=ray", "reward.gpus=1", "learner.ranks=1", "rollout.workers=1", sets]
    config = load_config([*REQUIRED, *given])
    assert placement_of(config, 4).rewards[0].gpus == (2, 3)  # a and b have the same one
    with pytest.raises(ConfigError, match=re.escape("reward.gpus=1 * 2 reward services in whole ones = 4 GPUs")):
        placement_of(config, 3)
    half = load_config([*REQUIRED, *given, "reward.gpus=0.5"])
    assert placement_of(half, 3).rewards[0].gpus == (2,)


def test_a_pool_of_its_own_is_refused_before_ray_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*overrides: str) -> str:
        return " ".join(missing_devices(load_config([*REQUIRED, *overrides]), "rollout"))

    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert not refused("rollout.workers=5")
    assert "rollout.workers=2 * engine.tensor_parallel=2 = 4 GPUs, but there are 2" in refused(
        "rollout.workers=2", "engine=vllm", "engine.tensor_parallel=2"
    )
    served = refused("reward.host=ray", "reward.gpus=2")
    assert "1 for rollout.workers=1 + reward.gpus=2 in whole ones = 3 GPUs, but there are 2" in served
    assert "The nearest setting that fits: rollout.workers=1 reward.gpus=1" in served
    assert "Set ray.gpus_per_worker=0," in refused("engine.device=cpu", "ray.gpus_per_worker=3")


@pytest.mark.parametrize("key", ["ray.gpus_per_worker", "reward.gpus"])
def test_ray_has_no_one_and_a_half_gpus(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}=1.5: Ray gives a part of one GPU, or whole ones. Set {key}=2"):
        load_config([*REQUIRED, "reward.host=ray", f"{key}=1.5"])
    with pytest.raises(ConfigError, match=rf"{key} must be at least 0; got inf"):
        load_config([*REQUIRED, "reward.host=ray", f"{key}=inf"])
    with pytest.raises(ConfigError, match=rf"{key}=1e-300 is less than Ray can give"):
        load_config([*REQUIRED, "reward.host=ray", f"{key}=1e-300"])


def test_four_and_four_and_engines_of_four() -> None:
    half = place(8, Demand(ranks=4, engines=4))
    assert half.learner_gpus == (0, 1, 2, 3) and half.rollout_gpus == (4, 5, 6, 7) and half.mode == "dedicated"
    wide = place(8, Demand(ranks=4, engines=1, tensor_parallel=4))
    assert wide.engines[0].gpus == (4, 5, 6, 7)


def test_one_gpu_is_shared_and_two_are_not() -> None:
    both = Demand(ranks=1, engines=1)
    assert place(1, both).mode == "colocated" and place(1, both).engine_memory == 0.45
    assert place(2, both).mode == "dedicated" and not place(2, both).shared
    assert place(1, Demand(engines=1)).mode == "dedicated"  # the learner is elsewhere


def test_what_does_not_fit_is_refused_with_the_sum_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=re.escape("learner.ranks=4 + rollout.workers=4 = 8 GPUs, but there are 4")):
        place(4, Demand(ranks=4, engines=4))
    with pytest.raises(
        ConfigError, match=re.escape("The nearest setting that fits: learner.ranks=2 rollout.workers=2, or")
    ):
        place(4, Demand(ranks=4, engines=4))
    with pytest.raises(ConfigError, match="engines that use several GPUs cannot share"):
        place(4, Demand(ranks=4, engines=2, tensor_parallel=4), "colocated")
    with pytest.raises(ConfigError, match="= 2 GPUs, but there are 1: a reward service shares no GPU with an engine"):
        place(1, Demand(ranks=1, engines=2, rewards=0.5), "colocated")


def test_engines_go_around_where_there_are_fewer_gpus() -> None:
    assert blocks(2, 3) == [(0,), (1,), (0,)]
    assert engine_share(2, Demand(engines=3)) == 0.5
    assert engine_share(4, Demand(engines=2, tensor_parallel=2)) == 2.0


def roles(visible: str, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> dict[str, Command]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    config = load_config([*REQUIRED, *overrides])
    bare = [Command(role=name, arguments=(), environment={}) for name in ("replay", "rollout", "learner")]
    return {command.role: command for command in with_gpus(bare, config, visible.split(",") if visible else ())}


def test_roles_get_the_names_that_were_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = roles("GPU-a,GPU-b,GPU-c", monkeypatch, "rollout.workers=2")
    assert commands["learner"].gpus == "GPU-a" and commands["rollout"].gpus == "GPU-b,GPU-c"
    assert commands["replay"].gpus is None and commands["learner"].arguments == ("placement.mode=dedicated",)
    assert "CUDA_VISIBLE_DEVICES=GPU-b,GPU-c" in str(commands["rollout"])


def test_a_shared_gpu_is_told_to_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = roles("7", monkeypatch, "engine=vllm")
    assert commands["learner"].gpus == commands["rollout"].gpus == "7"
    assert commands["learner"].arguments == ("placement.mode=colocated",)
    assert commands["rollout"].arguments == ("engine.vllm.gpu_memory_utilization=0.45",)
    own = roles("7", monkeypatch, "engine=vllm", "engine.vllm.gpu_memory_utilization=0.3")
    assert own["rollout"].arguments == ()
    among_themselves = roles("0,1", monkeypatch, "engine=vllm", "rollout.workers=2", "ray.gpus_per_worker=0.5")
    assert among_themselves["rollout"].arguments == ("engine.vllm.gpu_memory_utilization=0.45",)
    assert among_themselves["learner"].arguments == ("placement.mode=dedicated", "weights.backend=sockets")
    shared = ("engine=vllm", "rollout.workers=2", "ray.gpus_per_worker=0.5", "weights=files")
    assert roles("0,1", monkeypatch, *shared)["learner"].arguments == ("placement.mode=dedicated",)
    load_config([*REQUIRED, *shared, *roles("0,1", monkeypatch, *shared)["learner"].arguments])
    plain = roles("0,1", monkeypatch, "rollout.host=process", "rollout.workers=2", "ray.gpus_per_worker=0.5")
    assert (plain["learner"].gpus, plain["rollout"].gpus) == ("0", "1")


def test_what_ray_is_to_reserve_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = roles("0,1,2", monkeypatch, "rollout.workers=1", "ray.gpus_per_worker=2")
    assert commands["rollout"].gpus == "1,2"


@pytest.mark.parametrize("overrides", [[], ["learner.device=cpu", "engine.device=cpu"], ["engine=fake"]])
def test_without_gpus_and_on_the_cpu_nothing_is_set(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    visible = "" if not overrides else "0,1"
    commands = roles(visible, monkeypatch, *overrides)
    learner = "0" if overrides == ["engine=fake"] else None
    assert [commands[role].gpus for role in ("replay", "rollout", "learner")] == [None, None, learner]


def test_who_names_a_gpu_is_not_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert roles("0,1", monkeypatch, "learner.device=cuda:1")["learner"].gpus is None


def test_ray_reserves_what_an_engine_takes() -> None:
    def reserved(gpus: int, *overrides: str) -> float:
        return gpus_per_engine(load_config([*REQUIRED, *overrides]), gpus)

    assert reserved(4, "rollout.workers=4") == 1.0
    assert reserved(1, "rollout.workers=4") == 0.25
    assert reserved(3, "rollout.workers=2", "reward.host=ray", "reward.gpus=0.5") == 1.0
    assert reserved(8, "rollout.workers=2", "engine=vllm", "engine.tensor_parallel=4") == 4.0
    assert reserved(0, "rollout.workers=4") == 0.0 and reserved(4, "engine.device=cpu") == 0.0
    assert reserved(4, "ray.gpus_per_worker=0.5") == 0.5
    # Another cluster is not only ours to share.
    assert reserved(1, "rollout.workers=4", "ray.address=head:6379") == 1.0


def test_plain_workers_see_their_own_gpus() -> None:
    config = load_config([*REQUIRED, "rollout.host=process", "rollout.workers=3"])
    assert worker_gpus(config, ["4", "5", "6"]) == ["4", "5", "6"]
    assert worker_gpus(config, ["4"]) == ["4", "4", "4"] and worker_gpus(config, []) == ["", "", ""]


def test_a_plan_for_another_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config([*REQUIRED, "placement.gpus=8", "learner.ranks=4", "rollout.workers=4"])
    assert placement_of(config, 8).rollout_gpus == (4, 5, 6, 7)
    assert list(placement_of(load_config(REQUIRED), 0)) == []


@pytest.mark.parametrize(
    ("exported", "seen"),
    [
        ("0,1", ("0", "1")),
        (" 1, 0 ", ("1", "0")),
        ("GPU-a, GPU-b", ("GPU-a", "GPU-b")),
        ("GPU-a,MIG-b", ("GPU-a",)),
        ("0,GPU-a", ("0",)),
        ("0,0", ()),
        ("GPU-a,GPU-b,GPU-a", ()),
        ("1,,0", ("1",)),
        ("gpu0", ()),
        ("", ()),
        ("-1", ()),
        ("0,-1,1", ("0",)),
        ("NoDevFiles", ()),
        ("none", ()),
    ],
)
def test_the_exported_names_are_read_as_cuda_does(exported: str, seen: tuple[str, ...], monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", exported)
    assert visible_gpus() == seen


@pytest.mark.parametrize(
    ("exported", "says"),
    [
        ("0,0", "names a GPU twice, and then CUDA sees none. Set CUDA_VISIBLE_DEVICES=0"),
        ("0,-1,1", "its list ends at '-1', so CUDA sees 0 and not 1"),
        ("0,,1", "its list ends at '', so CUDA sees 0 and not 1"),
        ("0,5,1", "this machine has no GPU 5, so CUDA sees 0 and not 5,1"),
        ("gpu0", "'gpu0' is the name of no GPU, so CUDA sees no GPU and not gpu0"),
        ("0,GPU-a", "'GPU-a' is of another kind than '0', so CUDA sees 0 and not GPU-a"),
        (
            "MIG-a,MIG-b",
            "learner.ranks=2 on CUDA_VISIBLE_DEVICES=MIG-a,MIG-b: a process can only see the first MIG instance",
        ),
    ],
)
def test_gpus_that_are_named_and_that_cuda_does_not_see_are_told(
    exported: str, says: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("asyncrl.checks.placement.NVIDIA", tmp_path)
    monkeypatch.setattr("asyncrl.checks.placement.DEVICES", tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", exported)
    config = load_config([*REQUIRED, "learner.ranks=2"])
    for role in ("local", "learner"):
        (said,) = missing_devices(config, role)
        assert says in said
    assert not list(missing_devices(load_config([*REQUIRED, "learner.device=cpu", "engine.device=cpu"]), "local"))
    assert not list(missing_devices(config, "replay"))


@pytest.mark.parametrize(
    ("files", "kind", "seen"), [(0, "tmpfs", 4), (1, "tmpfs", 1), (4, "tmpfs", 4), (6, "tmpfs", 4), (1, "devtmpfs", 4)]
)
def test_in_a_container_only_those_gpus_that_have_device_files_count_of_those_that_the_driver_lists(
    files: int, kind: str, seen: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "mounts").write_text(
        f"proc /proc proc rw 0 0\n{kind} /dev {kind} rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n"
    )
    monkeypatch.setattr("asyncrl.checks.placement.MOUNTS", tmp_path / "mounts")
    for folder, names in {
        "driver": [f"0000:0{number}:00.0" for number in range(4)],
        "dev": ["nvidiactl", "nvidia-uvm", *(f"nvidia{number}" for number in range(files))],
    }.items():
        for name in names:
            (tmp_path / folder / name).mkdir(parents=True)
    monkeypatch.setattr("asyncrl.checks.placement.NVIDIA", tmp_path / "driver")
    monkeypatch.setattr("asyncrl.checks.placement.DEVICES", tmp_path / "dev")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == tuple(map(str, range(seen)))


@pytest.fixture
def no_driver_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without /proc/driver/nvidia. Returns its folder of device files, still empty."""
    (tmp_path / "dev").mkdir()
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr("asyncrl.checks.placement.NVIDIA", tmp_path / "none")
    monkeypatch.setattr("asyncrl.checks.placement.DEVICES", tmp_path / "dev")
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path / "dev"


def smi(folder: Path, script: str) -> None:
    file = folder.parent / "bin" / "nvidia-smi"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


def test_without_the_drivers_folder_device_files_count_and_else_nvidia_smi(no_driver_folder: Path) -> None:
    assert visible_gpus() == ()
    smi(no_driver_folder, "echo 'GPU 0: NVIDIA H200 (UUID: GPU-a)'; echo 'GPU 1: NVIDIA H200 (UUID: GPU-b)'")
    assert visible_gpus() == ("0", "1")
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl"):
        (no_driver_folder / name).touch()
    assert visible_gpus() == ("0", "1", "2")


@pytest.mark.parametrize("script", ["echo 'No devices were found'", "echo 'GPU 0: NVIDIA H200'; exit 9"])
def test_an_nvidia_smi_that_fails_shows_no_gpu(script: str, no_driver_folder: Path) -> None:
    smi(no_driver_folder, script)
    assert visible_gpus() == ()


def test_a_rank_whose_torch_sees_gpus_that_nothing_was_placed_on_is_refused(
    no_driver_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=r"torch sees 2 GPUs and asyncrl 0 .* Set CUDA_VISIBLE_DEVICES=0,1"):
            Place.of({}, device)
    assert Place.of({}, "cpu").device.type == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert Place.of({}, "auto").device.type == "cuda"


def test_more_ranks_than_gpus_are_refused_by_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    config = load_config(REQUIRED)
    for ranks, refused in (("2", False), ("4", True)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", ranks)
        said = list(missing_devices(config, "learner"))
        assert bool(said) == refused
    assert said == [
        "4 learner ranks were started here (torchrun's --nproc-per-node), one GPU each, and this machine has 2 of "
        "CUDA_VISIBLE_DEVICES=0,1. Start 2, or set learner.device=cpu"
    ]
    assert not list(missing_devices(load_config([*REQUIRED, "learner.device=cpu"]), "learner"))


@pytest.mark.parametrize(
    ("gpus", "overrides", "unseen"),
    [
        (1, [], ""),
        (1, ["rollout.workers=2"], ""),
        (
            8,
            ["rollout.workers=1"],
            "rollout worker 0 copies the weights out of the memory of GPU 0, and sees only GPU 1",
        ),
        (8, ["learner.ranks=2", "engine.tensor_parallel=2", "engine=vllm", "placement.mode=colocated"], ""),
        (8, ["learner.ranks=2", "rollout.workers=2", "placement.mode=colocated"], "GPU 0, and sees only one of 0, 1"),
        (8, ["rollout.workers=2", "rollout.host=process", "placement.mode=colocated"], "1 copies"),
    ],
)
def test_with_ipc_every_engine_sees_the_gpu_of_the_sender(gpus: int, overrides: list[str], unseen: str) -> None:
    config = load_config([*REQUIRED, "weights.backend=ipc", *overrides])
    said = " ".join(impossible_placement(config, gpus))
    assert unseen in said and bool(said) == bool(unseen)
    assert not list(impossible_placement(load_config([*REQUIRED, *overrides]), gpus))


@pytest.mark.parametrize(
    ("overrides", "shared"),
    [
        (["learner.ranks=4", "rollout.workers=4"], []),
        (["learner.ranks=2", "rollout.workers=4", "ray.gpus_per_worker=0.5"], [2, 3]),
        (["learner.ranks=2", "rollout.workers=2", "placement.mode=colocated"], [0]),
        (["learner.ranks=2", "engine.device=cuda:3"], []),
        (["learner.ranks=2", "engine.device=cuda:0"], [0]),
        (["learner.ranks=2", "engine.device=cuda:3", "rollout.workers=2"], [3]),
        (["learner.device=cuda:1", "rollout.workers=2"], [1]),
        (["learner.device=cuda:0", "engine.device=cuda:0"], [0]),
        (["learner.device=cpu", "rollout.workers=2"], []),
    ],
)
def test_nccl_is_neither_chosen_nor_accepted_where_two_of_its_members_are_on_one_gpu(
    overrides: list[str], shared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*more: str) -> str:
        return " ".join(impossible_placement(load_config([*REQUIRED, *overrides, *more]), 8))

    wanted = f"refuses two members on one GPU, and GPU {shared[0]} would have them" if shared else ""
    assert not said() and bool(said("weights.backend=nccl")) == bool(shared) and wanted in said("weights.backend=nccl")
    told = roles("0,1,2,3,4,5,6,7", monkeypatch, *overrides)["learner"].arguments
    assert bool({"weights.backend=sockets", "placement.mode=colocated"} & set(told)) == bool(shared)


def test_lists_that_end_as_they_may_are_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for exported in ("", "-1", "0,1,-1", "0,1,", "NoDevFiles"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", exported)
        assert not list(misread_gpus(load_config(REQUIRED)))


def test_fine_tuning_has_no_engines_that_want_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    given = SftConfig(data=SftDataConfig(path="d.jsonl"), learner=SftLearnerConfig(ranks=2))
    assert not list(missing_devices(learner_config(given), "local"))
    three = SftConfig(data=SftDataConfig(path="d.jsonl"), learner=SftLearnerConfig(ranks=3))
    assert "learner.ranks=3 = 3 GPUs, but there are 2" in " ".join(missing_devices(learner_config(three), "local"))


def test_where_gpus_cannot_be_counted_nothing_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    commands = roles("", monkeypatch, "placement.gpus=2")
    assert all(command.gpus is None for command in commands.values())
