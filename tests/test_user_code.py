"""Hashes of the user's code: what changes them, and what does not; and whose fault an error is."""

from __future__ import annotations

import hashlib
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from asyncrl.errors import UserCodeError
from asyncrl.user_code import called, code_fingerprint, load_function

REWARD = b"""
import json
from helpers import score
from package import parts
def f(completion, row):
    import late
"""
BESIDE = {
    "helpers.py": b"import deeper.table as table\nscore = 1",
    "deeper/table.py": b"a = 1",  # a folder without __init__.py
    "package/__init__.py": b"import helpers",
    "package/parts.py": b"from . import near\nfrom .inner.far import x",
    "package/near.py": b"from ..helpers import nothing",  # there is no package above
    "package/inner/__init__.py": b"",
    "package/inner/far.py": b"x = r'\\d' + '\\d'\nfrom ..up import *",
    "package/up.py": b"",
    "late.py": b"from r import f",
}
NONE_OF_IT = {"json.py": b"a = 1", "other.py": b"a = 1", "package/unused.py": b"a = 1", "helpers.txt": b"", "late": b""}


def written(folder: Path, **changes: bytes) -> Path:
    for name, code in ({"r.py": REWARD} | BESIDE | NONE_OF_IT | changes).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(code)
    return folder / "r.py"


def test_what_a_file_imports_from_beside_it_is_part_of_its_fingerprint_and_nothing_else_there(
    tmp_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    """Of a changed helper of a reward nobody knew."""
    numbers = itertools.count()

    def fingerprint(**changes: bytes) -> str:
        return code_fingerprint(f"{written(tmp_path / str(next(numbers)), **changes)}:f")

    same = fingerprint()
    for name in NONE_OF_IT:
        assert fingerprint(**{name: b"b = 2"}) == same, name
    changed = [fingerprint(**{name: code + b"\n"}) for name, code in BESIDE.items()]
    assert len({same, *changed}) == 1 + len(BESIDE)
    assert fingerprint(**{"helpers.py": b"no python (", "package/parts.py": b"\0"}) not in (same, *changed)
    assert not recwarn.list


def test_a_file_that_imports_nothing_from_beside_it_has_the_fingerprint_that_runs_of_before_noted(
    tmp_path: Path,
) -> None:
    file = written(tmp_path, **{"r.py": b"import json, math\nfrom . import late\n"})
    assert code_fingerprint(f"{file}:f") == hashlib.sha256(file.read_bytes()).hexdigest()[:16]
    assert code_fingerprint("math:sqrt") == "math:sqrt"


def test_every_file_beside_it_that_an_import_runs_is_one_of_them(tmp_path: Path) -> None:
    """What Python does is what is read off the files."""
    whole = {"package/near.py": b"", "late.py": b"", "package/inner/far.py": b"x = 1\nfrom ..up import *"}
    file = written(
        tmp_path / "folder_of_a_reward", **whole, **{"r.py": REWARD.replace(b"    import", b"    pass\nimport")}
    )
    before, beside = set(sys.modules), tmp_path / "folder_of_a_reward"
    load_function(f"{file}:f")
    loaded = {name: sys.modules.pop(name) for name in set(sys.modules) - before}
    files = [Path(str(each.__file__)) for each in loaded.values() if getattr(each, "__file__", None)]
    names = {each.relative_to(beside).as_posix() for each in files if each.is_relative_to(beside)} - {"r.py"}
    assert names == set(BESIDE)


def test_a_collective_that_breaks_because_another_rank_died_is_not_the_fault_of_the_code_that_calls_it() -> None:
    """Such a learner was ended for good, and not restarted."""
    store, wait = dist.HashStore(), timedelta(seconds=60)
    with ThreadPoolExecutor(2) as threads:
        ranks = list(threads.map(lambda rank: dist.ProcessGroupGloo(store, rank, 2, wait), range(2)))
    ranks.pop().abort()

    def collective() -> None:
        ranks[0].allreduce([torch.zeros(3)]).wait()  # pyright: ignore[reportAttributeAccessIssue]

    with pytest.raises(RuntimeError) as raised:
        called(collective, "learner.hook=mine.py:f")
    assert not isinstance(raised.value, UserCodeError)
    with pytest.raises(UserCodeError, match=r"mine\.py:f raised RuntimeError: of mine"):
        called(lambda: (_ for _ in ()).throw(RuntimeError("of mine")), "learner.hook=mine.py:f")
