"""The report's page in a real browser (headless Chromium), if there is one: it shows the content of the files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asyncrl.telemetry.reports.page import page_of
from benchmarks.parts.browser import browser, chromium
from tests.telemetry.reports.test_page import make_run, some_rows

pytestmark = [
    pytest.mark.slow,
    pytest.mark.unhurried,
    pytest.mark.skipif(chromium() is None, reason="no Chromium here: the page was not looked at in a browser"),
]

SEEN = """
(async () => {
  const until = async (found) => {
    const end = Date.now() + 30000;
    while (!found() && Date.now() < end) await new Promise(then => setTimeout(then, 10));
    return found();
  };
  const texts = (where, what) => [...document.querySelectorAll(`${where} ${what}`)].map(each => each.textContent);
  const typed = (id, value) => {
    const box = document.getElementById(id);
    box.value = value;
    box.dispatchEvent(new Event("input"));
  };
  const broken = [], said = { broken };
  addEventListener("error", event => broken.push(event.message));
  addEventListener("securitypolicyviolation", event => broken.push(`asked for ${event.blockedURI}`));
  await until(() => document.readyState === "complete" && document.title);
  const reward = "#curves figure[data-metric='reward/mean']";
  document.querySelector(reward).scrollIntoView();
  await until(() => document.querySelector(`${reward} svg path`));
  const ends = [...document.querySelectorAll("#ends tbody tr")];
  said.ends = ends.map(row => [...row.children].map(cell => cell.firstChild.textContent));
  said.figures = texts("#curves figure", "figcaption");
  said.lines = document.querySelectorAll(`${reward} svg path[fill=none]`).length;
  said.over_the_edge = document.documentElement.scrollWidth - innerWidth;
  typed("smooth", "0.9");
  await until(() => document.querySelector(`${reward} .smooth`));
  said.smooth = document.querySelectorAll(`${reward} .smooth`).length;
  document.querySelector("#legend input").click();
  said.smooth_after_hiding_one = document.querySelectorAll(`${reward} .smooth`).length;
  typed("word", "needle");
  await until(() => document.getElementById("found").textContent.startsWith("1 "));
  said.found = texts("#samples tbody", "td.wide");
  typed("word", "");
  await until(() => document.querySelectorAll("#samples tbody tr").length > 1);
  const head = [...document.querySelectorAll("#samples th")].find(cell => cell.textContent === "reward");
  const rewards = () => texts("#samples tbody tr", "td[data-head=reward]").map(Number);
  head.click();
  said.upwards = rewards();
  head.click();
  said.downwards = rewards();
  return said;
})()
"""


@pytest.mark.parametrize("width", [1280, 500])
def test_a_page_in_a_browser_shows_the_files_numbers_and_can_be_searched_sorted_and_smoothed(
    tmp_path: Path, width: int
) -> None:
    samples = [
        {"step": step, "prompt": f"p{step}", "completion": "a needle" if step == 2 else "hay", "reward": float(-step)}
        for step in range(1, 5)
    ]
    rows = some_rows(300, 0), some_rows(40, 1)
    runs = [make_run(tmp_path / "a", rows[0], samples), make_run(tmp_path / "b", rows[1])]
    page = tmp_path / "page.html"
    page.write_text(page_of(runs))
    with browser(tmp_path / "profile", width=width) as window:
        window.open(page)
        seen = window.run(SEEN)
    assert seen["broken"] == []
    assert seen["over_the_edge"] <= 0, "nobody has to scroll sideways"
    ends = {metric: [float(value.removesuffix(" ★")) for value in values] for metric, *values in seen["ends"]}
    for place, found in enumerate(rows):
        steps = len(found) - 1
        mean = [row["reward/mean"] for row in found[steps - max(1, steps // 10) : steps]]
        assert ends["reward/mean"][place] == pytest.approx(sum(mean) / len(mean), rel=1e-4)
        assert ends["eval/heldout/accuracy"][place] == 0.625
    assert any(text.startswith("eval/heldout/accuracy") for text in seen["figures"])
    assert all(re.search(r"\w", text) for text in seen["figures"])
    assert seen["lines"] == 2
    assert (seen["smooth"], seen["smooth_after_hiding_one"]) == (2, 1)
    assert seen["found"] == ["p2", "a needle"]
    assert seen["upwards"] == [-4, -3, -2, -1] and seen["downwards"] == [-1, -2, -3, -4]
