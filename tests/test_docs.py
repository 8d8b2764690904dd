from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from asyncrl.cli.arguments.parser import parse
from asyncrl.cli.main import main
from asyncrl.config import config_keys, load_config
from asyncrl.sft.rules import load_sft
from asyncrl.sft.settings import SftConfig

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("**/*.md") if "_build" not in page.parts)
PAGES = ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", *DOCS]
OF_SFT = ("docs/sft.md", "docs/sft_settings.md", "CHANGELOG.md")
THEIRS_FIRST = "docs/from_verl_trl.md"
"""The first column of its tables has settings of verl and TRL."""
"""Pages that name settings of `asyncrl sft` too."""
FOLDERS = ("asyncrl", "configs", "launchers", "benchmarks", "tests")


@pytest.mark.parametrize("page", PAGES)
def test_every_path_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text()
    quoted = {word for span in re.findall(r"`([^`\n]+)`", text) for word in re.findall(r"[\w./-]+", span)}
    named = quoted | set(re.findall(r"\b(?:asyncrl|configs|launchers|benchmarks|tests)/[\w./-]*\w", text))
    paths = {
        word.rstrip(".")
        for word in named
        if (word.startswith(tuple(f"{folder}/" for folder in FOLDERS)) or word.endswith(".md")) and "NAME" not in word
    }
    assert paths or page not in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def without_blocks(page: str) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```$", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(page: str) -> set[str]:
    """Names of its headings, as GitHub and the site (`myst_heading_anchors`) give them."""
    found: set[str] = set()
    for title in re.findall(r"^#{1,3} (.+)$", without_blocks(page), flags=re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", "-")
        found.add(next(each for each in [name, *(f"{name}-{i}" for i in range(1, 9))] if each not in found))
    return found


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_to_a_file_and_a_heading_that_exist(page: str) -> None:
    """The build of the site cannot tell: to it, files of the repository that are no pages are missing too."""
    targets = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", without_blocks(page)))
    broken: list[str] = []
    for target in targets:
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        file = ((ROOT / page).parent / path).resolve() if path else ROOT / page
        missing = not file.exists() or (anchor and anchor not in anchors(str(file.relative_to(ROOT))))
        broken += [target] if missing else []
    assert broken == []


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_a_page_names_exists(page: str) -> None:
    rooms = {key.split(".")[0] for key in config_keys() if "." in key}
    text = (ROOT / page).read_text()
    if page == THEIRS_FIRST:
        text = re.sub(r"^\| .*? \|", "|", text, flags=re.MULTILINE)
    named = set(re.findall(r"`((?:[a-z]+)\.(?:[a-z_]+))(?:=[^`]*)?`", text))
    settings = {name for name in named if name.split(".")[0] in rooms and name not in ("reward.py", "run.json")}
    known = {*config_keys(), *(config_keys(SftConfig) if page in OF_SFT else ())}
    assert settings - known == set()


def test_the_readme_s_defaults_are_the_defaults() -> None:
    config = load_config(["model.path=m", "data.path=d", "reward.function=r.py:f"])
    text = (ROOT / "README.md").read_text()
    for room, key in re.findall(r"^\| `(replay|rollout)\.([a-z_]+)` \(", text, flags=re.MULTILINE):
        shown = re.search(rf"`{room}\.{key}` \(`?(\w+)`?\)", text)
        assert shown is not None
        assert shown.group(1) == str(getattr(getattr(config, room), key)).lower()


def test_the_changelog_is_one_line_for_each_thing_under_its_area() -> None:
    _, unreleased = (ROOT / "CHANGELOG.md").read_text().split("## [Unreleased]", 1)
    areas = re.split(r"^### ", unreleased, flags=re.MULTILINE)[1:]
    lines = [line for area in areas for line in area.splitlines()[1:] if line]
    assert areas and [line for line in lines if not line.startswith("- ")] == []


def test_the_cluster_settings_of_the_readme_are_accepted() -> None:
    settings = re.search(r'^S="([^"]+)"', (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert settings is not None
    load_config(shlex.split(settings.group(1)))


def test_every_config_file_starts_with_what_it_is_for() -> None:
    bare = [str(file) for file in (ROOT / "configs").rglob("*.yaml") if not file.read_text().startswith("#")]
    assert bare == []


def test_constraints_pin_every_dependency_exactly() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[\w.]+", line) for line in lines)
    pinned = {line.split("==")[0] for line in lines}
    project = (ROOT / "pyproject.toml").read_text()
    base = project.split("dependencies = [", 1)[1].split("]", 1)[0]
    assert {re.split(r"[<>=]", name)[0] for name in re.findall(r'"([^"]+)"', base)} <= pinned


@pytest.mark.parametrize("script", ["quickstart.sh", "test.sh", "learner.sh", "replay.sh"])
def test_launchers_stop_at_the_first_error(script: str) -> None:
    assert "set -euo pipefail" in (ROOT / "launchers" / script).read_text()


def commands() -> list[tuple[str, str]]:
    """Page and line of every command in a shell block, its variables filled in from the block."""
    found: list[tuple[str, str]] = []
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), flags=re.DOTALL):
            settings = re.search(r'^S="([^"]+)"', block, flags=re.MULTILINE)
            for line in block.splitlines():
                line = line.replace("$S", settings.group(1) if settings else "").split("  #")[0].split("   # ")[0]
                words = [word for word in shlex.split(line, comments=True) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
                if words and words[0] in ("asyncrl", "bash", "python") and words[1:]:
                    found.append((page, shlex.join(words)))
    return sorted(set(found))


@pytest.mark.parametrize(("page", "line"), commands())
def test_every_command_a_page_shows_is_one(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its settings load, its paths are there, and `asyncrl` takes it. What it does, integration tests show."""
    program, *words = shlex.split(line)
    if program in ("bash", "python") and words[0] != "-m":
        assert (ROOT / words[0]).is_file(), f"{page} shows {line}"
        words = [{"quickstart.sh": "quickstart", "rollout.py": "rollout"}.get(Path(words[0]).name, "local"), *words[1:]]
        if line.startswith(("bash launchers/test.sh", "bash launchers/docs.sh")):
            return
    elif program == "python":
        module = words[1].replace(".", "/")
        assert (ROOT / f"{module}.py").is_file() or (ROOT / module / "__main__.py").is_file(), f"{page} shows {line}"
        return
    given = parse(words)
    if given.command in ("local", "rollout", "learner", "replay", "quickstart"):
        own = ["experiment=quickstart"] if given.command == "quickstart" else []
        rest = [word for word in given.overrides if word != "..."]
        load_config([*own, "model.path=m", "data.path=d", "eval.path=e", "reward.function=r.py:f", *rest])
    if given.command == "sft":
        given.overrides = [word for word in given.overrides if not word.endswith(".yaml")]
        load_sft(["model.path=m", "data.path=d", "eval.path=e", *given.overrides])
    if given.command == "keys":
        monkeypatch.chdir(tmp_path)
        assert main(words) == 0
