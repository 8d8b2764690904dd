"""The way of the weights between pretended GPUs: what a communicator is given, what arrives, and on which streams."""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._C import DisableTorchFunctionSubclass as Plainly

from asyncrl.weights.broadcast.publisher import BroadcastSender
from asyncrl.weights.broadcast.staging import Staging
from asyncrl.weights.broadcast.subscriber import BroadcastSubscriber
from asyncrl.weights.broadcast.wires import Link
from asyncrl.weights.fingerprint import LEAF, Fingerprint, bucket_fingerprint
from asyncrl.weights.publishing.publisher import WeightPublisher
from asyncrl.weights.sliced import Wanted
from tests.pretended_gpu import DEFAULT, DeviceError, pinned, place_of, pretended_gpus, stream_here
from tests.waiting import until
from tests.weights.board import Board, WorkerRendezvous

LEARNER, ENGINE = torch.device("cuda", 1), torch.device("cuda", 2)
TIMEOUT_S = 30.0
HALF: Wanted = {f"layers.{i}.w": (((0, 20), (0, 25)),) for i in range(4)}


class Communicator:
    """Stands in for `dist.ProcessGroupNCCL`: takes only what lies on its own GPU, and sends it by gloo."""

    took: ClassVar[list[tuple[torch.device, str]]] = []
    """The GPU of each buffer, and the stream after whose work it is sent."""

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(max_ctas=32)

    def __init__(self, store: dist.Store, rank: int, world: int, options: Communicator.Options) -> None:
        self._place = store, rank, world

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert torch.cuda.current_device() == device.index, "otherwise the thread would also use the first GPU"
        self._device = device
        self._group = dist.ProcessGroupGloo(*self._place, timedelta(seconds=TIMEOUT_S))

    def broadcast(self, buffers: list[torch.Tensor], options: dist.BroadcastOptions) -> Any:
        (buffer,) = buffers
        assert place_of(buffer) == self._device and buffer.dtype == torch.uint8 and buffer.is_contiguous()
        self.took.append((self._device, stream_here()))
        with Plainly():
            return self._group.broadcast([buffer.as_subclass(torch.Tensor)], options)  # pyright: ignore[reportAttributeAccessIssue]

    def abort(self) -> None:
        self._group.abort()


def weights(version: int, dtype: torch.dtype, place: torch.device | str) -> dict[str, torch.Tensor]:
    torch.manual_seed(version)
    made = {f"layers.{i}.w": torch.randn(40, 25).to(dtype).to(place) for i in range(4)}
    return made | {"count": torch.arange(5, dtype=torch.int32).to(LEARNER)}


@pytest.mark.parametrize(
    "case",
    [
        {},
        {"bucket": 512},
        {"dtype": torch.bfloat16},
        {"keeps": HALF},
        {"place": "cpu"},
        {"backend": "sockets"},
    ],
    ids=lambda case: ",".join(f"{name}" for name in case) or "plain",
)
@pytest.mark.timeout(120)
def test_weights_pass_from_gpu_to_gpu_and_no_piece_waits_for_training_or_generation(case: dict[str, Any], monkeypatch):
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Communicator, raising=False)
    monkeypatch.setattr(Communicator, "took", [])
    hashed: list[str] = []
    of_device = Fingerprint.update_on_device
    monkeypatch.setattr(
        Fingerprint, "update_on_device", lambda self, flat: (hashed.append(stream_here()), of_device(self, flat))[1]
    )
    backend, keeps, dtype = case.get("backend", "nccl"), case.get("keeps"), case.get("dtype", torch.float32)
    board, arrived = Board(), dict[int, dict[str, torch.Tensor]]()
    board.join("w", "1")
    with pretended_gpus(4):
        sender = BroadcastSender(
            board,  # pyright: ignore[reportArgumentType]
            Link(host="127.0.0.1", timeout_s=TIMEOUT_S, backend=backend, device=LEARNER),
            poll_members_s=0.1,
        )
        publisher = WeightPublisher(
            sender, wire_dtype=torch.bfloat16, bucket_bytes=case.get("bucket", 4096), wait_s=TIMEOUT_S,
            device=LEARNER,
        )  # fmt: skip
        staging = Staging(ENGINE)
        staging.keeps = keeps
        subscriber = BroadcastSubscriber(
            WorkerRendezvous(board, "w"), lambda version, found: arrived.update({version: _copies(found, keeps)}),
            worker="w", incarnation="1", timeout_s=TIMEOUT_S, receiver=staging,
        )  # fmt: skip
        until(lambda: sender._door.rang, "the worker has said hello", within_s=TIMEOUT_S)
        for version in range(3):
            given = weights(version, dtype, case.get("place", LEARNER))
            publisher.publish(version, given.items())
            publisher.wait()
            until(lambda version=version: version in arrived, lambda: str(publisher._failure), within_s=TIMEOUT_S)
            subscriber.check()
            for name, tensor in arrived[version].items():
                wanted = given[name].cpu()
                wanted = wanted.to(torch.bfloat16) if wanted.is_floating_point() else wanted
                assert place_of(tensor) is None and torch.equal(tensor, wanted[: len(tensor)]), (version, name)
        publisher.close()
        subscriber.close()
        casting = sum(map(len, sender._buffers._buffers)) if backend == "sockets" else 0
        assert sum(pinned) == staging.nbytes + casting, "or the engine would be paused for longer"
    assert {device for device, _ in Communicator.took} == ({LEARNER, ENGINE} if backend == "nccl" else set())
    assert DEFAULT not in {stream for _, stream in Communicator.took} | set(hashed)
    assert bool(hashed) == (backend == "nccl")


def _copies(found: Any, keeps: Wanted | None) -> dict[str, torch.Tensor]:
    """What an engine would copy out of the staged tensors."""
    if keeps is None:
        return {name: tensor.clone() for name, tensor in found.items()}
    rows = {name: tensor if name not in keeps else tensor.narrow(0, 0, 20) for name, tensor in found.items()}
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for name, tensor in rows.items()}


def test_a_fingerprint_is_taken_on_its_gpu():
    flat = torch.randint(0, 256, (3 * LEAF + 77,), dtype=torch.uint8)
    with pretended_gpus(2):
        assert bucket_fingerprint(flat.to("cuda:1")) == bucket_fingerprint(flat)


def test_the_pretence_refuses_what_a_gpu_would():
    with pretended_gpus(2):
        here, there, host = torch.ones(3, device="cuda:0"), torch.ones(3, device="cuda:1"), torch.ones(3)
        for one, other in ((here, there), (here, host), (host, there)):
            with pytest.raises(DeviceError):
                _ = one + other
        with pytest.raises(DeviceError):
            host.index_select(0, torch.zeros(1, dtype=torch.int64, device="cuda"))
        with pytest.raises(DeviceError):
            _ = host[torch.zeros(1, dtype=torch.int64, device="cuda")]
        with pytest.raises(TypeError):
            here.numpy()
        assert (here + 1).to("cuda:1").device == torch.device("cuda", 1) and here.cpu().numpy().tolist() == [1, 1, 1]
        seen: list[torch.device] = []
        thread = threading.Thread(target=lambda: seen.append(torch.zeros(1, device="cuda:1").device))
        thread.start()
        thread.join()
        assert seen == [torch.device("cuda", 1)]
    assert not torch.cuda.is_available() or torch.cuda.device_count()
