"""Load a user's functions and classes, named in settings as `file.py:name` or `package.module:name`.

Importing runs the user's code. So only a process that uses it may import it, or one that was started to find out
whether it can be imported (`try_in_process`).
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
import tempfile
import traceback
import uuid
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO

from asyncrl.errors import AsyncRLError, ConfigError, UserCodeError
from asyncrl.utils.process_tree import describe_exit, die_with_parent, kill_marked

IMPORT_S = 120.0
"""How long importing user code may take in a process that only tries it."""
MARK = "ASYNCRL_TRIAL"
"""Environment variable of a trial and of everything that it starts."""
FINE = b"\0"


def load_function(spec: str, setting: str = "reward.function") -> Callable[..., Any]:
    """The function or class named by `file.py:name` or `package.module:name`.

    Args:
        setting: the key that named it, for the error.

    Raises:
        ConfigError: malformed name; no such file, module or function; or importing it failed.
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
    """Whether `value` is a function, or a class that `module` itself defines."""
    own = inspect.isclass(value) and value.__module__ == module.__name__
    return own or inspect.isfunction(value)


def _load_file(path: Path, given: str) -> ModuleType:
    if not path.is_file():
        raise ConfigError(f"{given}: there is no file {path} (looked from {Path.cwd()})")
    path = path.resolve()
    _claim_neighbours(path, given)
    known = f"user_file_{path.stem}_{zlib.crc32(str(path.parent).encode()):08x}"  # two of one name may be in use
    location = importlib.util.spec_from_file_location(known, path)
    assert location is not None and location.loader is not None  # holds for any name that ends in .py
    module = importlib.util.module_from_spec(location)
    sys.modules[location.name] = module  # without this, dataclasses would fail in it
    try:
        with _on_path(str(path.parent)):
            location.loader.exec_module(module)
    # User code at a process boundary: whatever it raises, even a script's exit, becomes one refused setting.
    except (Exception, SystemExit) as error:
        alone = (
            ". A file has no package around it: write package.module:name" if "relative import" in str(error) else ""
        )
        raise ConfigError(f"{given}: importing it failed: {type(error).__name__}: {error}{alone}") from error
    return module


@contextmanager
def _on_path(folder: str) -> Iterator[None]:
    """Within the block, modules are found in `folder` first, after those of the standard library: libraries import
    these, too, and would get a file of the same name."""
    before, library = list(sys.path), Path(os.__file__).parent
    standard = [each for each in before if Path(each) in (library, library / "lib-dynload")]
    during = [*standard, folder, *(each for each in before if each not in standard)]
    sys.path[:] = during
    try:
        yield
    finally:
        sys.path[:] = [*(each for each in sys.path if each not in during), *before]  # what the file added stays


_NEIGHBOURS: dict[str, Path] = {}
"""Name of a module -> the folder from which a user's file imports it."""


def _claim_neighbours(path: Path, given: str) -> None:
    """Raises ConfigError if a file imports from its own folder a module of a name that another folder's files import:
    the process has one module of each name, so it would get the other."""
    files = with_imports(path, _files_of)
    for name in sorted({Path(file.relative_to(path.parent).parts[0]).stem for file in files if file != path}):
        other = _NEIGHBOURS.setdefault(name, path.parent)
        if other != path.parent:
            raise ConfigError(
                f"{given} imports {name} from {path.parent}, and another file of yours one from {other}. A process can "
                "have only one module of each name. Rename one of the two"
            )


def _load_module(name: str, given: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # as above
        raise ConfigError(f"{given}: importing it failed: {type(error).__name__}: {error}") from error


def with_args(spec: str, args: Mapping[str, Any], setting: str, takes: int) -> Callable[..., Any]:
    """The callable that `spec` names, with `args` bound: a function gets them as keyword arguments, a class is
    instantiated with them. `takes` is the number of positional arguments it will be called with.

    Raises:
        ConfigError: see `load_function`; or it does not accept these arguments.
    """
    function = load_function(spec, setting)
    try:
        if inspect.isclass(function):
            made = function(**args)
            if not callable(made):
                raise ConfigError(f"{setting}={spec}: an object of this class cannot be called. Give it __call__")
            inspect.signature(made).bind(*range(takes))
            _refuse_async(made.__call__, spec, setting)
            return made
        inspect.signature(function).bind(*range(takes), **args)
        _refuse_async(function, spec, setting)
    except ConfigError:
        raise
    except Exception as error:  # user code at a process boundary: whatever making it raises is one refused setting
        given = f" and {', '.join(args)}" if args else ""
        raise ConfigError(
            f"{setting}={spec} must take {takes} argument(s){given}: {type(error).__name__}: {error}"
        ) from error
    return functools.partial(function, **args)


def _refuse_async(function: Callable[..., Any], spec: str, setting: str) -> None:
    if inspect.iscoroutinefunction(function):
        raise ConfigError(f"{setting}={spec} is async, and the learner's step awaits nothing. Define it with `def`")


_MADE: dict[tuple[str, str, str], Callable[..., Any]] = {}


def made_once(spec: str, args: Mapping[str, Any], setting: str) -> Callable[..., Any]:
    """`with_args` of a callable that takes one argument; the same object at every call in this process."""
    key = setting, spec, repr(dict(args))
    if key not in _MADE:
        _MADE[key] = with_args(spec, args, setting, takes=1)
    return _MADE[key]


def called(function: Callable[..., Any], named: str, *arguments: Any) -> Any:
    """Call a user's function and return its result.

    Args:
        named: the setting and its value, for the error.

    Raises:
        UserCodeError: whatever it raised, with the line number. asyncrl's own errors pass unchanged, and those of a
            collective in which another rank died: the ranks are restarted then, and the code is not to blame.
    """
    try:
        return function(*arguments)
    except AsyncRLError:
        raise
    # User code at a process boundary. An exit with code 0 would make a learner look as if it had trained all steps.
    except (Exception, SystemExit) as error:
        if _of_another_rank(error):
            raise
        raise UserCodeError(f"{named} raised {described(error)}") from error


def _of_another_rank(error: BaseException) -> bool:
    """Whether a connection between ranks broke: nccl has classes for its errors, gloo names its file."""
    classes = {f"{each.__module__}.{each.__name__}" for each in type(error).__mro__}
    return "torch.distributed.DistError" in classes or "gloo/transport/" in str(error)


def described(error: BaseException) -> str:
    """The error's class, text and place: the innermost line of the user's own files, else of a package they call; none
    if it is in asyncrl, as where a function does not take its arguments."""
    ours = (str(Path(__file__).parent), "<")
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not each.filename.startswith(ours)]
    installed = ("site-packages", "dist-packages", os.path.dirname(os.__file__))
    theirs = [each for each in frames if not any(place in each.filename for place in installed)]
    places = [f" ({Path(each.filename).name}, line {each.lineno})" for each in theirs or frames]
    return f"{type(error).__name__}: {error}{places[-1] if places else ''}"


def code_fingerprint(spec: str) -> str:
    """16 hex digits over the file of `file.py:name` and what it imports from its own folder. For a module, or a file
    that is not on this machine, the name itself."""
    place = Path(spec.rpartition(":")[0])
    if place.suffix != ".py" or not place.is_file():
        return spec
    digest = hashlib.sha256(place.read_bytes())
    place = place.resolve()
    near = with_imports(place, _files_of)
    del near[place]
    named = {file.relative_to(place.parent).as_posix(): code for file, code in near.items()}
    for name, code in sorted(named.items()):  # sorted: the result must not depend on a machine's directory order
        digest.update(f"{name}/{len(code)}/".encode() + code)
    return digest.hexdigest()[:16]


def with_imports(path: Path, files_of: Callable[[Path, tuple[str, ...]], Iterable[Path]]) -> dict[Path, bytes]:
    """The contents of a file and, transitively, of the files that it imports from its own folder. Nothing is run, so
    imports of a name computed at run time are not found.

    Args:
        files_of: maps the folder and a module name, in parts, to the module's files there; to none if it is from
            elsewhere.
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
    """The names that `code` imports (see `_named`); none if it does not parse."""
    try:
        with warnings.catch_warnings(action="ignore"):  # whoever imports it sees them
            nodes = list(ast.walk(ast.parse(code)))
    except (SyntaxError, ValueError, RecursionError):  # whoever loads it reports this
        return set()
    return {name for node in nodes for name in _named(node, package)}


def _named(node: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Each name that a statement imports, in parts. `from a import b` gives `a.b`, since b may be a module.

    Args:
        package: the package that the code is in; empty if none.
    """
    if isinstance(node, ast.Import):
        yield from (tuple(alias.name.split(".")) for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.level <= len(package):
        above = package[: len(package) - node.level + 1] if node.level else ()
        base = (*above, *(node.module.split(".") if node.module else ()))
        yield from ((*base, alias.name) for alias in node.names)


def _files_of(folder: Path, module: tuple[str, ...]) -> Iterator[Path]:
    """The files in `folder` that importing `module` runs, including its packages'; none for a module from elsewhere."""
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
    """Try the user's code in a process that runs `module`, which calls `answer`.

    Args:
        settings: sent as JSON; values that JSON does not have are sent as text.
        named: the settings and their values, for the errors.

    Raises:
        ConfigError: it answered with a refusal, took too long, or ended without an answer.
    """
    question = json.dumps(dict(settings), default=str).encode()
    said = ask_process(module, question, f"{named}: importing it", timeout_s)
    if said != FINE:
        raise ConfigError(said.decode(errors="replace"))


def answer(arguments: list[str], trial: Callable[[dict[str, Any]], None]) -> None:
    """The other end of `try_in_process`: run `trial(settings)` and send back its refusal, if any."""
    question, out = question_of(arguments)
    said = FINE
    try:
        trial(json.loads(question))
    except AsyncRLError as error:
        said = str(error).encode(errors="replace")
    with out:
        out.write(said)


def ask_process(module: str, question: bytes, doing: str, timeout_s: float, way_out: str = "") -> bytes:
    """Run `python -m MODULE ANSWER_FD PARENT_PID` with the question as its input, and return its answer. Its output is
    not shown, and what it started ends with it: an environment may start a sandbox when it is made.

    Args:
        doing: what it does, for the errors.
        way_out: what to do if it ended without an answer.

    Raises:
        ConfigError: it took too long, or ended without an answer.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryFile() as answers:  # not a pipe: a child of the import may keep the other end open
        try:
            ended = subprocess.run(
                [sys.executable, "-m", module, str(answers.fileno()), str(os.getpid())],
                input=question,
                pass_fds=[answers.fileno()],
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=timeout_s,
                check=False,
                env={**os.environ, MARK: mark},
            )
        except subprocess.TimeoutExpired as error:
            raise ConfigError(f"{doing} took more than {timeout_s:g} s") from error
        finally:
            kill_marked(mark, MARK)
        answers.seek(0)
        said = answers.read()
    if not said:
        raise ConfigError(f"{doing} ended its process ({describe_exit(ended.returncode)}){way_out}")
    return said


def question_of(arguments: list[str]) -> tuple[bytes, BinaryIO]:
    """The other end of `ask_process`: return the question, and the file for the answer."""
    answer_fd, parent_pid = map(int, arguments)
    die_with_parent(parent_pid)
    os.set_inheritable(answer_fd, False)
    return sys.stdin.buffer.read(), os.fdopen(answer_fd, "wb")
