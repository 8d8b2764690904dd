"""Tests of `asyncrl report --serve`: whoever has the address gets the current page, and nobody else."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.cli.report_server import CurrentPage, ReportServer

DEADLINE_S = 60.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text("seed: 1\n")
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 1.0, "reward/mean": 0.25}) + "\n")
    return tmp_path


@pytest.fixture
def server(folder: Path) -> Iterator[ReportServer]:
    with ReportServer(CurrentPage([folder])) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def ask(server: ReportServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, str, str]:
    """Code, text and tag."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=DEADLINE_S)
    try:
        connection.request(method, path, headers={"Host": host or f"127.0.0.1:{server.server_port}"})
        answer = connection.getresponse()
        assert answer.getheader("Access-Control-Allow-Origin") is None
        return answer.status, answer.read().decode(), answer.getheader("ETag") or ""
    finally:
        connection.close()


def test_the_page_is_made_anew_when_a_run_has_written_more(server: ReportServer, folder: Path) -> None:
    path = f"/{server.token}/"
    code, text, tag = ask(server, path)
    assert code == 200 and "0.25" in text and "0.75" not in text and "connect-src 'self'" in text
    assert ask(server, path, method="HEAD") == (200, "", tag)
    assert ask(server, path, host=f"localhost:{server.server_port}")[1:] == (text, tag)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, "time": 2.0, "reward/mean": 0.75}) + "\n")
    assert ask(server, path, method="HEAD")[2] != tag
    assert "0.75" in ask(server, path)[1]
    histogram = {"step": 2, "histogram/reward": {"edges": [0.0, 0.5, 1.0], "counts": [3, 1]}}
    (folder / "histograms.jsonl").write_text(json.dumps(histogram) + "\n")  # it comes after the row of its step
    assert '"counts":[3,1]' in ask(server, path)[1]
    (folder / "config.yaml").unlink()
    (folder / "metrics.jsonl").unlink()
    assert ask(server, path)[0] == 503, "told, and it serves on"


def test_strangers_and_other_names_of_this_machine_get_nothing(server: ReportServer) -> None:
    port, right = server.server_port, f"/{server.token}/"
    assert server.server_address[0] == "127.0.0.1" and len(server.token) >= 40
    for path in (
        "/",
        "/report.html",
        f"/{server.token}",
        f"/{server.token[:-1]}x/",
        f"{right}../x",
    ):
        for method in ("GET", "HEAD"):
            code, text, _ = ask(server, path, method=method)
            assert code == 403 and server.token not in text and "reward" not in text
    for host in (f"evil.example:{port}", "127.0.0.1", f"127.0.0.1:{port}.evil.example", f"127.0.0.1:{port + 1}", " "):
        assert ask(server, right, host=host)[0] == 403
    assert ask(server, right, method="POST")[0] == 501
