"""Weights by `pull`: the way to the newest version, broken or altered transfers, and what is kept."""

from __future__ import annotations

import contextlib
import hashlib
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import fsspec
import httpx
import pytest
import torch

from asyncrl.errors import ConfigError, WeightsError
from asyncrl.weights.files import server as files_server
from asyncrl.weights.files import shelf as shelves
from asyncrl.weights.files import subscriber as subscribing
from asyncrl.weights.files.fetching import AlteredError, Fetcher, UnreachableError
from asyncrl.weights.files.items import Item, way
from asyncrl.weights.files.sender import LONGEST, FilesSender
from asyncrl.weights.files.server import FilesServer
from asyncrl.weights.files.shelf import FolderShelf, UrlShelf
from asyncrl.weights.files.subscriber import FilesSubscriber
from asyncrl.weights.publishing.snapshot import BackgroundPublisher
from tests.waiting import until
from tests.weights.board import Board, WorkerRendezvous

SIZE = 4096


def item(name: str, nbytes: int, fingerprint: str, base: str = "") -> Item:
    return Item(name=name, nbytes=nbytes, digest="", fingerprint=fingerprint, base=base)


FULL, NEXT, THEN, AGAIN = item("f", 100, "a"), item("d", 10, "b", "a"), item("e", 10, "c", "b"), item("g", 25, "c")


@pytest.mark.parametrize(("items", "have", "names"), [
    ([FULL, NEXT, THEN], "", "fde"),
    ([FULL, NEXT, THEN], "a", "de"),
    ([FULL, NEXT, THEN], "b", "e"),
    ([FULL, NEXT, THEN], "c", ""),
    ([FULL, NEXT, THEN], "of another learner", "fde"),
    ([FULL, NEXT, THEN, AGAIN], "", "g"),
    ([FULL, NEXT, THEN, AGAIN], "a", "de"),
    ([FULL, NEXT, THEN, item("h", 5, "c")], "a", "h"),
    ([FULL, NEXT, item("i", 10, "a", "b"), THEN], "", "fde"),
])  # fmt: skip
def test_the_way_to_the_newest_version_has_the_fewest_bytes(items, have, names):
    assert "".join(step.name for step in way(items, "c", have)) == names


def test_what_leads_nowhere_or_out_of_the_folder_is_refused():
    with pytest.raises(WeightsError, match="none of the 2 published files"):
        way([NEXT, THEN], "c", "")
    with pytest.raises(WeightsError, match="not a published file"):
        Item.from_wire(item("../../etc/passwd", 1, "a").to_wire())


OPEN: list = []


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    while OPEN:
        OPEN.pop().close()


class Learner:
    """A publisher over HTTP, or at a URL; `send` returns when the version is announced."""

    def __init__(self, board: Board, folder: Path, url: str = "", delta: str = "always") -> None:
        self.board, self.folder = board, folder
        folder.mkdir(exist_ok=True)
        self.server = None if url else FilesServer(folder, "127.0.0.1", idle_s=60.0)
        shelf = UrlShelf(url, folder, within_s=0.0) if url else FolderShelf(folder, self.server)
        self.sender = FilesSender(board, folder, delta=delta, shelf=shelf)
        self.publisher = BackgroundPublisher(self.sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=60)
        OPEN.append(self.publisher)

    def send(self, version: int, weights: torch.Tensor) -> dict:
        self.publisher.publish(version, [("w", weights.clone())])
        until(
            lambda: self.sender.stats()["weights/sent_version"] == version,
            holds=lambda: self.publisher._failure is None,
        )
        return self.board.view()[1]["weights"]


class Worker:
    """A subscriber and what its engine was given."""

    def __init__(self, board: Board) -> None:
        self.loaded: list[tuple[int, torch.Tensor]] = []
        self.subscriber = FilesSubscriber(WorkerRendezvous(board, "a"), self._load)
        OPEN.append(self.subscriber)

    def _load(self, version: int, tensors) -> None:
        self.loaded.append((version, tensors["w"].clone()))

    def serves(self, version: int, weights: torch.Tensor) -> None:
        def served() -> bool:
            self.subscriber.check()
            loaded, tensor = self.loaded[-1] if self.loaded else (-1, weights)
            return loaded == self.subscriber.policy_version == version and torch.equal(tensor, weights)

        until(served)

    def received(self) -> float:
        return self.subscriber.stats()["weights/received_bytes"]


@pytest.fixture(params=["http", "memory"])
def place(request, tmp_path) -> Iterator[str]:
    yield "" if request.param == "http" else f"memory://{tmp_path.name}"


def test_full_versions_and_deltas_reach_a_worker_and_a_second_start_of_the_learner_goes_on(tmp_path, place):
    board, weights = Board(), torch.arange(float(SIZE))
    learner, worker = Learner(board, tmp_path / "weights", place), Worker(board)
    for version in range(3):
        weights[version] += 1
        announced = learner.send(version, weights)
        worker.serves(version, weights)
    assert [bool(each["base"]) for each in announced["items"]] == [False, True, True]
    assert 4 * SIZE < worker.received() < 5 * SIZE, "one full version and two small deltas"
    late = Worker(board)
    late.serves(2, weights)
    # Killed after a file was written and before it was announced, started again from an older checkpoint: version 2 is
    # another one, and a delta from what workers serve is not there.
    orphan = tmp_path / "weights" / f"v00000009-{shelves.tag_of(tmp_path / 'weights')}-0.partial"
    orphan.write_bytes(b"half")
    weights[0] = -7
    again = Learner(board, tmp_path / "weights", place)
    again.send(2, weights)
    worker.serves(2, weights)
    weights[1] = -8
    again.send(3, weights)
    worker.serves(3, weights)
    late.serves(3, weights)
    names = [path.name for path in (tmp_path / "weights").iterdir()]
    if place:
        files, root = fsspec.core.url_to_fs(place)
        names += [str(path).rpartition("/")[2] for path in files.ls(root, detail=False)]
    kept = {each["name"] for each in board.view()[1]["weights"]["items"]}
    left = {name for name in names if name != "tag"}
    assert left == kept, "nothing of the first start"


def test_a_new_full_version_comes_in_time_and_old_ones_go_but_not_under_a_reader(tmp_path):
    board, weights = Board(), torch.zeros(SIZE)
    learner = Learner(board, tmp_path / "weights")
    assert learner.server is not None
    first = learner.send(0, weights)["items"][0]["name"]
    with learner.server.reading(first):
        for version in range(1, 4 * LONGEST):
            weights[version] = 1
            items = learner.send(version, weights)["items"]
            assert len(way([Item.from_wire(each) for each in items], items[-1]["fingerprint"], "")) <= LONGEST
        assert (learner.folder / first).exists()
    full = [path for path in learner.folder.glob("v*.safetensors") if ".delta" not in path.name]
    assert len(full) == 4, "three, and the one that is being read"
    learner.server.idle_s = 0.0
    weights[0] = 1
    learner.send(4 * LONGEST, weights)
    assert not (learner.folder / first).exists()


def test_weights_that_stay_the_same_are_not_written_again(tmp_path):
    board, weights = Board(), torch.ones(SIZE)
    learner, worker = Learner(board, tmp_path / "weights", delta="never"), Worker(board)
    learner.send(0, weights)
    worker.serves(0, weights)
    assert len(learner.send(1, weights)["items"]) == 1
    worker.serves(1, weights)


@pytest.fixture
def served(tmp_path) -> Iterator[tuple[FilesServer, Item, bytes]]:
    data = bytes(range(256)) * 64
    name = "v00000001-a-b.safetensors"
    (tmp_path / name).write_bytes(data)
    (tmp_path / "secret").write_text("not published")
    server = FilesServer(tmp_path, "127.0.0.1")
    digest = hashlib.sha256(data).hexdigest()
    yield server, Item(name=name, nbytes=len(data), digest=digest, fingerprint="x"), data
    server.close()


def told(server: FilesServer) -> dict:
    return FolderShelf(server.folder, server).told


def test_the_server_gives_published_files_to_whoever_has_the_token(served):
    server, item, data = served
    key = {"Authorization": f"Bearer {server.token}"}
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        assert client.get(f"/{item.name}").status_code == 401
        assert client.get(f"/{item.name}", headers={"Authorization": "Bearer no"}).status_code == 401
        assert [client.get(path, headers=key).status_code for path in ("/", "/secret", "/../x", f"//{item.name}")] == [
            404
        ] * 4
        assert client.get(f"/{item.name}", headers=key).content == data
        part = client.get(f"/{item.name}", headers=key | {"Range": "bytes=100-"})
        assert (part.status_code, part.content) == (206, data[100:])
        assert client.get(f"/{item.name}", headers=key | {"Range": f"bytes={len(data)}-"}).status_code == 416
    assert not server.reads("another") and server.reads(item.name)


def test_a_body_does_not_wait_until_its_head_has_arrived(served, monkeypatch):
    server, item, _ = served
    at_once: list[int] = []
    said = files_server._Answers.send_response

    def answer(self, code: int) -> None:
        at_once.append(self.connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        said(self, code)

    monkeypatch.setattr(files_server._Answers, "send_response", answer)
    key = {"Authorization": f"Bearer {server.token}"}
    assert httpx.get(f"{server.url}/{item.name}", headers=key, trust_env=False).status_code == 200
    assert len(at_once) == 1 and at_once[0]


def test_who_sends_one_byte_at_a_time_holds_no_place(tmp_path):
    server = FilesServer(tmp_path, "127.0.0.1", idle_s=0.3)
    began = time.monotonic()
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=60) as slow, pytest.raises(OSError):
        while time.monotonic() - began < 60:
            slow.sendall(b"G")
            time.sleep(0.05)
    server.close()


def test_workers_that_all_come_at_once_wait_for_no_second_try(tmp_path, monkeypatch):
    monkeypatch.setattr(FilesServer, "serve_forever", lambda self, poll_interval: None)  # it is busy
    server = FilesServer(tmp_path, "127.0.0.1")
    with contextlib.ExitStack() as stack:
        for _ in range(64):
            stack.enter_context(socket.create_connection(("127.0.0.1", server.server_port), timeout=60))
    server.server_close()


class Breaking:
    """A source whose first transfer breaks off in the middle."""

    def __init__(self, source) -> None:
        self.source, self.asked = source, []

    def blocks(self, item, start):
        self.asked.append(start)
        for at, block in self.source.blocks(item, start):
            if len(self.asked) == 1:
                yield at, block[:1000]
                raise UnreachableError("cut")
            yield at, block

    def close(self) -> None:
        self.source.close()


def test_a_broken_transfer_goes_on_where_it_broke_and_an_altered_file_is_asked_for_anew(served):
    server, item, data = served
    fetcher = Fetcher(told(server), 60.0, lambda: False)
    fetcher._source = breaking = Breaking(fetcher._source)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UnreachableError):
        fetcher.fetch(item)
    assert Path(fetcher.fetch(item)).read_bytes() == data
    assert breaking.asked == [0, 1000] and fetcher.received == len(data)
    path = server.folder / item.name
    for wrong in (data[:-1] + b"!", data[:500], data + b"more"):
        fetcher.end()
        path.write_bytes(wrong)
        with pytest.raises(AlteredError):
            fetcher.fetch(item)
        path.write_bytes(data)
        assert Path(fetcher.fetch(item)).read_bytes() == data
    fetcher.close()


@pytest.mark.parametrize("size", [1000, 10_000])
def test_a_disk_without_room_for_a_file_ends_no_worker_and_is_asked_again(size, monkeypatch):
    data = bytes(range(250)) * (size // 250)
    item = Item(name="v00000001-a-b.safetensors", nbytes=size, digest=hashlib.sha256(data).hexdigest(), fingerprint="x")
    fetcher = Fetcher({"url": "http://127.0.0.1:1"}, 60.0, lambda: False)
    source = SimpleNamespace(blocks=lambda item, start: [(start, data[start:])], close=lambda: None)
    fetcher._source = source  # pyright: ignore[reportAttributeAccessIssue]
    for place, said in (("/dev/full", "No space left"), ("/dev/full", "No space left"), ("/nowhere/x", "No such file")):
        with monkeypatch.context() as full:
            full.setattr(tempfile, "TemporaryFile", lambda place=place, **_: open(place, "w+b"))  # noqa: SIM115
            with pytest.raises(UnreachableError, match=f"cannot be kept.*{said}"):
                fetcher.fetch(item)
    assert Path(fetcher.fetch(item)).read_bytes() == data
    fetcher.close()


def test_a_version_that_stays_altered_ends_the_worker_with_the_reason_and_one_that_is_gone_does_not(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(subscribing, "_AGAIN_S", 0.01)
    board, weights = Board(), torch.arange(float(SIZE))
    learner = Learner(board, tmp_path / "weights", delta="never")
    learner.send(0, weights)
    worker = Worker(board)
    worker.serves(0, weights)
    announced = board.view()[1]["weights"]
    item = announced["items"][0] | {"name": "v00000001-a-b.safetensors", "fingerprint": "1"}
    bad = announced | {"policy_version": 1, "fingerprint": "1", "items": [item]}
    board.announce({"weights": bad})
    until(lambda: worker.subscriber.stats()["weights/nacks"] >= 3)
    worker.subscriber.check()
    (tmp_path / "weights" / item["name"]).write_bytes(bytes(item["nbytes"]))
    until(lambda: worker.subscriber._altered_since[0] == "1")
    worker.subscriber.check()
    worker.subscriber._altered_since = "1", time.monotonic() - 61
    until(lambda: worker.subscriber._failure is not None)
    with pytest.raises(
        WeightsError, match=r"version 1 arrived altered at every try for weights\.timeout_s=60 s.*sha256"
    ):
        worker.subscriber.check()
    assert worker.subscriber.policy_version == 0


def test_a_url_that_cannot_be_written_is_refused_or_named():
    with pytest.raises(ConfigError, match=r"weights\.url=nosuch://x is not a URL that fsspec can open"):
        UrlShelf("nosuch://x", Path("/nowhere"))


def test_an_upload_that_fails_for_too_long_says_where(tmp_path):
    (tmp_path / "file").write_text("in the way")
    learner = Learner(Board(), tmp_path / "weights", f"file://{tmp_path}/file/below")
    learner.publisher.publish(0, [("w", torch.ones(4))])
    until(lambda: learner.publisher._failure is not None)
    with pytest.raises(WeightsError, match=r"could not be written to file://.*file/below"):
        learner.publisher.publish(1, [("w", torch.ones(4))])
