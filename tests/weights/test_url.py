"""Weights as files at a URL: the way to the newest version, broken or altered transfers, and what is kept."""

from __future__ import annotations

import hashlib
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import fsspec
import pytest
import torch

from asyncrl.errors import ConfigError, WeightsError
from asyncrl.weights.files import shelf as shelves
from asyncrl.weights.files import subscriber as subscribing
from asyncrl.weights.files.fetching import AlteredError, Fetcher, UnreachableError
from asyncrl.weights.files.items import Item, way
from asyncrl.weights.files.sender import LONGEST, FilesSender
from asyncrl.weights.files.shelf import UrlShelf
from asyncrl.weights.files.subscriber import FilesSubscriber
from asyncrl.weights.publishing.publisher import WeightPublisher
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


class Ranges(SimpleHTTPRequestHandler):
    """A web server of a folder that can start in the middle of a file."""

    def log_message(self, *_: object) -> None: ...

    def do_GET(self) -> None:
        path, asked = self.translate_path(self.path), self.headers.get("Range", "")
        if not asked or not os.path.isfile(path):
            return super().do_GET()
        start, data = int(asked.removeprefix("bytes=").rstrip("-")), Path(path).read_bytes()
        if start >= len(data):
            return self.send_error(416)
        self.send_response(206)
        self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        self.wfile.write(data[start:])


@contextmanager
def web_server(folder: Path) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: Ranges(*given, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


class Learner:
    """A publisher at a URL; `send` returns when the version is announced."""

    def __init__(self, board: Board, folder: Path, url: str = "", delta: str = "always", read_url: str = "") -> None:
        self.board, self.folder = board, folder
        folder.mkdir(exist_ok=True)
        self.url = url or f"file://{folder}-there"
        shelf = UrlShelf(self.url, folder, read_url=read_url, within_s=0.0)
        self.sender = FilesSender(board, folder, delta=delta, shelf=shelf)
        self.publisher = WeightPublisher(self.sender, wire_dtype=torch.float32, bucket_bytes=1 << 20, wait_s=60)
        OPEN.append(self.publisher)

    def there(self) -> list[str]:
        """Names of the files at the URL."""
        files, root = fsspec.core.url_to_fs(self.url)
        files.invalidate_cache()
        return [str(path).rpartition("/")[2] for path in files.ls(root, detail=False)]

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
def place(request, tmp_path) -> Iterator[tuple[str, str]]:
    """Where the learner writes, and where workers read."""
    if request.param == "memory":
        yield f"memory://{tmp_path.name}", ""
        return
    folder = tmp_path / "there"
    folder.mkdir()
    with web_server(folder) as url:
        yield f"file://{folder}", url


def test_full_versions_and_deltas_reach_a_worker_and_a_second_start_of_the_learner_goes_on(tmp_path, place):
    board, weights = Board(), torch.arange(float(SIZE))
    learner, worker = Learner(board, tmp_path / "weights", place[0], read_url=place[1]), Worker(board)
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
    again = Learner(board, tmp_path / "weights", place[0], read_url=place[1])
    again.send(2, weights)
    worker.serves(2, weights)
    weights[1] = -8
    again.send(3, weights)
    worker.serves(3, weights)
    late.serves(3, weights)
    kept = {each["name"] for each in board.view()[1]["weights"]["items"]}
    assert set(again.there()) == kept, "nothing of the first start"
    (base,) = {path.name for path in (tmp_path / "weights").iterdir()} - {"tag"}
    assert base.startswith("v00000003-"), "the next delta is computed from it"


def test_a_new_full_version_comes_in_time_and_old_ones_go(tmp_path):
    board, weights = Board(), torch.zeros(SIZE)
    learner = Learner(board, tmp_path / "weights")
    first = learner.send(0, weights)["items"][0]["name"]
    for version in range(1, 4 * LONGEST):
        weights[version] = 1
        items = learner.send(version, weights)["items"]
        assert len(way([Item.from_wire(each) for each in items], items[-1]["fingerprint"], "")) <= LONGEST
    full = [name for name in learner.there() if ".delta" not in name]
    assert len(full) == 3 and first not in full


def test_weights_that_stay_the_same_are_not_written_again(tmp_path):
    board, weights = Board(), torch.ones(SIZE)
    learner, worker = Learner(board, tmp_path / "weights", delta="never"), Worker(board)
    learner.send(0, weights)
    worker.serves(0, weights)
    assert len(learner.send(1, weights)["items"]) == 1
    worker.serves(1, weights)


@pytest.fixture
def served(tmp_path) -> Iterator[tuple[str, Path, Item, bytes]]:
    data = bytes(range(256)) * 64
    name = "v00000001-a-b.safetensors"
    (tmp_path / name).write_bytes(data)
    digest = hashlib.sha256(data).hexdigest()
    with web_server(tmp_path) as url:
        yield url, tmp_path / name, Item(name=name, nbytes=len(data), digest=digest, fingerprint="x"), data


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
    url, path, item, data = served
    fetcher = Fetcher(url, 60.0, lambda: False)
    fetcher._source = breaking = Breaking(fetcher._source)  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(UnreachableError):
        fetcher.fetch(item)
    assert Path(fetcher.fetch(item)).read_bytes() == data
    assert breaking.asked == [0, 1000] and fetcher.received == len(data)
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
    fetcher = Fetcher("http://127.0.0.1:1", 60.0, lambda: False)
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
    (tmp_path / "weights-there" / item["name"]).write_bytes(bytes(item["nbytes"]))
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
