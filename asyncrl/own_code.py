"""Code of the user by path: functions and classes named in settings as `file.py:name` or `package.module:name`.

Importing runs it: only a process that uses it, or one that was started to find out whether it can be used
(`try_in_process`), may.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import json
import os
import subprocess
import sys
import traceback
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

from asyncrl.errors import AsyncRLError, ConfigError, OwnCodeError
from asyncrl.family import describe_exit, die_with_parent

IMPORT_S = 120.0
"""What importing code of the user may take in a process that only tries it."""
MOST_BYTES = 8000
"""Of an answer of that process: a pipe holds them without a reader."""
FINE = b"\0"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def load_function(spec: str, setting: str = "reward.function") -> Callable[..., Any]:
    """The function, or class, named by `file.py:name` or `package.module:name`.

    Args:
        setting: which key named it, for the error.

    Raises:
        ConfigError: malformed, no such file, module or function; or importing it failed.
    """
    given = f"{setting}={spec!r}"
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ConfigError(f"{given} names no function. Write file.py:name or package.module:name")
    module = _load_file(Path(place), given) if place.endswith(".py") else _load_module(place, given)
    function = getattr(module, name, None)
    if function is None:
        defined = sorted(key for key, value in vars(module).items() if _is_of(module, value))
        raise ConfigError(f"{given}: {place} has no {name!r}. It defines: {', '.join(defined)}")
    if not callable(function):
        raise ConfigError(f"{given} is a {type(function).__name__}, not a function")
    return function


def _is_of(module: ModuleType, value: Any) -> bool:
    """Whether it is a function, or a class that the module itself defines."""
    own = inspect.isclass(value) and value.__module__ == module.__name__
    return own or inspect.isfunction(value)


def _load_file(path: Path, given: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{given}: there is no file {path} (looked from {Path.cwd()})")
    folder = path.resolve().parent
    known = f"user_file_{path.stem}_{zlib.crc32(str(folder).encode()):08x}"  # two of one name may be in use
    location = importlib.util.spec_from_file_location(known, path)
    assert location is not None and location.loader is not None  # holds for any name that ends in .py
    module = importlib.util.module_from_spec(location)
    # Registered and with its folder importable, so that dataclasses and imports of neighbouring files work in it.
    sys.modules[location.name] = module
    sys.path.insert(0, str(folder))
    try:
        with _own_neighbours(folder, given):
            location.loader.exec_module(module)
        _refuse_late_of_two(path.resolve(), given)
    except ConfigError:
        raise
    # User code at a process boundary: whatever it raises is one refused setting, the exit of a script included.
    except (Exception, SystemExit) as error:
        alone = (
            ". A file has no package around it: write package.module:name" if "relative import" in str(error) else ""
        )
        raise ConfigError(f"{given}: importing it failed: {type(error).__name__}: {error}{alone}") from error
    return module


_FOLDERS: set[Path] = set()
"""Of files that were loaded."""
_LATE: dict[tuple[Path, str], None] = {}
"""Each loaded file, and what its functions import from beside it once they are called."""


class _StandardFirst:
    """A file beside one of the user's does not stand in for a module of Python's, for libraries would get it too."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if path is not None or name not in sys.stdlib_module_names or not _FOLDERS:
            return None
        return PathFinder.find_spec(name, [each for each in sys.path if Path(each).resolve() not in _FOLDERS], target)


sys.meta_path.insert(0, _StandardFirst)


@contextmanager
def _own_neighbours(folder: Path, given: str) -> Iterator[None]:
    """Within it `import helpers` finds the one in `folder`, not one that a file from elsewhere has imported.

    Raises:
        ConfigError: there are two now, and a later import would find either.
    """
    elsewhere = {str(each) for each in _FOLDERS - {folder}}
    others = [name for name, module in sys.modules.items() if _is_beside(module, elsewhere)]
    clash = {name for name in others if (folder / f"{name}.py").is_file() or (folder / name).is_dir()}
    hidden = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in clash}
    for name in hidden:
        del sys.modules[name]
    _FOLDERS.add(folder)
    try:
        yield
    finally:
        twice = next((name for name in clash if name in sys.modules), "")
        sys.modules.update({name: module for name, module in hidden.items() if name not in sys.modules})
    if twice:
        raise ConfigError(
            f"{given} imports {twice} from {folder}, and another file of yours one from "
            f"{Path(str(hidden[twice].__file__)).parent}: one process has one module of a name. Rename one of the two"
        )


def _refuse_late_of_two(path: Path, given: str) -> None:
    """Raises ConfigError where a function of a loaded file will import a neighbour of which another folder has one."""
    functions = [each for each in ast.walk(ast.parse(path.read_bytes())) if isinstance(each, FUNCTIONS)]
    for each in (each for function in functions for each in ast.walk(function)):
        names = [name for name, *_ in _named(each, ())]
        _LATE.update(dict.fromkeys((path, name) for name in names if name not in sys.stdlib_module_names))
    for file, name in _LATE:
        places = (f"{name}.py", f"{name}/__init__.py")
        found = [folder for folder in sorted(_FOLDERS) if any((folder / place).is_file() for place in places)]
        if len(found) > 1 and file.parent in found and not _is_beside(sys.modules.get(name), {str(file.parent)}):
            raise ConfigError(
                f"{given}: a function of {file} imports {name} when it is called, and {found[0]} and {found[1]} both "
                "have one: it would get either. Rename one of the two, or import it at the top of the file"
            )


def _is_beside(module: object, folders: Collection[str]) -> bool:
    """Whether it is a module, or a package, right in one of them. Texts: thousands of modules are asked each time."""
    folder, name = os.path.split(str(getattr(module, "__file__", None) or ""))
    return (os.path.dirname(folder) if name == "__init__.py" else folder) in folders


def _load_module(name: str, given: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # as above
        raise ConfigError(f"{given}: importing it failed: {type(error).__name__}: {error}") from error


def with_args(spec: str, args: Mapping[str, Any], setting: str, takes: int) -> Callable[..., Any]:
    """What `spec` names, to be called with `takes` positional arguments; `args` go to a function by name, and a class
    is made with them.

    Raises:
        ConfigError: see `load_function`; or it does not take these arguments.
    """
    function = load_function(spec, setting)
    try:
        if inspect.isclass(function):
            made = function(**args)
            if not callable(made):
                raise ConfigError(f"{setting}={spec}: an object of this class cannot be called. Give it __call__")
            inspect.signature(made).bind(*range(takes))
            return made
        inspect.signature(function).bind(*range(takes), **args)
    except ConfigError:
        raise
    except Exception as error:  # user code at a process boundary: whatever making it raises is one refused setting
        given = f" and {', '.join(args)}" if args else ""
        raise ConfigError(
            f"{setting}={spec} must take {takes} argument(s){given}: {type(error).__name__}: {error}"
        ) from error
    return functools.partial(function, **args)


def called(function: Callable[..., Any], named: str, *arguments: Any) -> Any:
    """What it returns.

    Args:
        named: the setting with its value, for the error.

    Raises:
        OwnCodeError: whatever it raised, with the line that did; asyncrl's own errors as they are.
    """
    try:
        return function(*arguments)
    except AsyncRLError:
        raise
    # User code at a process boundary. By an exit with 0 a learner would pass for one that has trained all its steps.
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        raise OwnCodeError(
            f"{named} raised {type(error).__name__}: {error} ({Path(last.filename).name}, line {last.lineno})"
        ) from error


def code_fingerprint(spec: str) -> str:
    """16 hex digits over the file of `file.py:name` and what it imports from beside it; of a module, or a file that is
    not here, the name itself."""
    place = Path(spec.rpartition(":")[0])
    if place.suffix != ".py" or not place.is_file():
        return spec
    digest = hashlib.sha256(place.read_bytes())
    place = place.resolve()
    near = with_imports(place, _files_of)
    del near[place]
    named = {file.relative_to(place.parent).as_posix(): code for file, code in near.items()}
    for name, code in sorted(named.items()):  # by name: the order is that of no machine's folder
        digest.update(f"{name}/{len(code)}/".encode() + code)
    return digest.hexdigest()[:16]


def with_imports(path: Path, files_of: Callable[[Path, tuple[str, ...]], Iterable[Path]]) -> dict[Path, bytes]:
    """Contents of a file, which is not run for that, of what it imports from its folder, and of what that imports from
    there. What is imported by a name that is made up at run time is not found.

    Args:
        files_of: of that folder and a module, in parts, the files there that are meant; of one from elsewhere none.
    """
    found: dict[Path, bytes] = {}
    waiting = [path]
    while waiting:
        file = waiting.pop()
        if file not in found:
            found[file] = file.read_bytes()
            for module in _imported(found[file], file.parent.relative_to(path.parent).parts):
                waiting += files_of(path.parent, module)
    return found


def _imported(code: bytes, package: tuple[str, ...]) -> set[tuple[str, ...]]:
    """See `_named`; of code that is none, nothing."""
    try:
        with warnings.catch_warnings(action="ignore"):  # they are told to whoever imports it
            nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError):  # whoever loads it says so
        return set()
    return {name for node in nodes for name in _named(node, package)}


def _named(node: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Each name that a statement imports, in parts: of `from a import b` `a.b`, which may be a module.

    Args:
        package: which the code is in, empty of none.
    """
    if isinstance(node, ast.Import):
        yield from (tuple(alias.name.split(".")) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level <= len(package):
        above = package[: len(package) - node.level + 1] if node.level else ()
        base = (*above, *(node.module.split(".") if node.module else ()))
        yield from ((*base, alias.name) for alias in node.names)


def _files_of(folder: Path, module: tuple[str, ...]) -> Iterator[Path]:
    """Files in `folder` that importing `module` runs, its packages' too; none of a module from elsewhere."""
    if module[0] in sys.stdlib_module_names:
        return
    for parts in itertools.accumulate((part,) for part in module):
        place = folder.joinpath(*parts)
        file = next(filter(Path.is_file, (place / "__init__.py", place.with_suffix(".py"))), None)
        if file is not None:
            yield file
        elif not place.is_dir():
            return


def try_in_process(module: str, settings: Mapping[str, Any], named: str, timeout_s: float = IMPORT_S) -> None:
    """Run `python -m MODULE SETTINGS ANSWER_FD PARENT_PID`, which ends in `answer`; what it prints is not shown.

    Args:
        settings: as JSON; what is none is sent as its text.
        named: the setting, or settings, with their value, for the errors.

    Raises:
        ConfigError: the refusal it answered with; or it took too long, or its process ended without an answer.
    """
    read, write = os.pipe()
    try:
        os.set_blocking(read, False)  # a child of the import may keep the other end open
        ended = subprocess.run(
            [sys.executable, "-m", module, json.dumps(dict(settings), default=str), str(write), str(os.getpid())],
            pass_fds=[write],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=timeout_s,
            check=False,
        )
        said = b""
        with suppress(BlockingIOError):
            said = os.read(read, MOST_BYTES)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(f"{named}: importing it took more than {timeout_s:g} s") from error
    finally:
        os.close(read)
        os.close(write)
    if not said:
        raise ConfigError(f"{named}: importing it ended its process ({describe_exit(ended.returncode)})")
    if said != FINE:
        raise ConfigError(said.decode(errors="replace"))


def answer(arguments: list[str], trial: Callable[[dict[str, Any]], None]) -> None:
    """The other end of `try_in_process`: `trial(settings)`, and what it refuses."""
    settings, answer_fd, parent_pid = arguments
    die_with_parent(int(parent_pid))
    os.set_inheritable(int(answer_fd), False)
    said = FINE
    try:
        trial(json.loads(settings))
    except AsyncRLError as error:
        said = str(error).encode(errors="replace")[:MOST_BYTES]
    os.write(int(answer_fd), said)
