"""The keys of a run: one CURVE pair per role, in files. A process can only have a role whose secret it holds.

    server.key   server.key_secret     the replay server
    learner.key  learner.key_secret    the ranks of the learner
    worker.key   worker.key_secret     rollout workers

A machine needs all `*.key` and the secrets of the roles that run on it. Without `replay.keys`, the folder `keys` in the
run folder is used, which the first process of the run creates.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from zmq.auth import create_certificates, load_certificate

from asyncrl.config import KEYS_DIR, LOG_DIR
from asyncrl.errors import ConfigError, RunFolderError
from asyncrl.schema import Config

ROLES = ("server", "learner", "worker")


@dataclass(frozen=True, slots=True)
class KeyPair:
    public: bytes
    secret: bytes


def make_keys(directory: Path, aside: Path | None = None) -> None:
    """Create a pair for each role; the folder gets mode 0700, the files 0600. It appears complete or not at all.

    Args:
        aside: the folder in which it is prepared, on the same file system; by default the parent of `directory`.

    Raises:
        ConfigError: `directory` exists already. OSError: it cannot be written.
    """
    aside = aside or directory.absolute().parent
    aside.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=aside, prefix="keys-"))  # with mode 0700
    try:
        for role in ROLES:
            for path in create_certificates(str(made), role):
                os.chmod(path, 0o600)  # not by the umask, which is process-wide: another thread may change it
        try:
            made.rename(directory)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                raise
            raise ConfigError(f"{directory} already exists. Remove it, or give another folder") from None
    finally:
        shutil.rmtree(made, ignore_errors=True)


def with_keys(config: Config) -> Config:
    """Return the settings with the full path of the keys' folder in `replay.keys`: the given one, or that of the run.

    Raises:
        ConfigError: another user could have written or read the run's keys. RunFolderError: they cannot be written.
    """
    given = config.replay.keys
    directory = Path(given).resolve() if given else run_keys(Path(config.run.dir).resolve())
    return replace(config, replay=replace(config.replay, keys=str(directory)))


def run_keys(folder: Path) -> Path:
    """Return the folder of keys in a run folder, created if it does not exist.

    Raises:
        ConfigError: another user could have written or read the keys. RunFolderError: they cannot be written.
    """
    directory = folder / KEYS_DIR
    if not directory.is_dir():
        try:
            # In the log folder: before the run is prepared, nothing else may be in the run folder
            # (`refuse_used_folder`).
            make_keys(directory, aside=folder / LOG_DIR)
        except ConfigError:
            if not directory.is_dir():  # if it exists, another process of the run was faster
                raise
        except OSError as error:
            raise RunFolderError(
                f"run.dir={folder}: its keys cannot be written: {error}. Free space there, or give another run.dir"
            ) from error
    if why := open_to_others(directory, directory.stat()):
        raise ConfigError(f"{why}. Remove it, or keep the keys elsewhere: `asyncrl keys DIR` and replay.keys=DIR")
    return directory


def open_to_others(folder: Path, found: os.stat_result) -> str:
    """Return why another user could read or write in the folder that was `found`; empty if nobody else can."""
    mode, own = stat.S_IMODE(found.st_mode), os.geteuid()
    if found.st_uid == own and not mode & 0o077:
        return ""
    return (
        f"{folder} has mode {mode:04o} and belongs to user {found.st_uid}. It must have mode 0700 and belong to you "
        f"(user {own})"
    )


def public_key(keys: str, role: str) -> bytes:
    """Return the public key of `role`. Raises ConfigError if it is missing or unreadable."""
    return _load(Path(keys), f"{role}.key")[0]


def key_pair(keys: str, role: str) -> KeyPair:
    """Return both keys of `role`. Raises ConfigError: the secret is missing, unreadable, or open to all users."""
    directory, name = Path(keys), f"{role}.key_secret"
    public, secret = _load(directory, name)
    mode = stat.S_IMODE((directory / name).stat().st_mode)
    if mode & 0o007:
        raise ConfigError(f"{directory / name} has mode {mode:04o}, so other users can read it. Run chmod 600 on it")
    if not secret:
        raise ConfigError(
            f"{directory / name} contains no secret. Copy it again from the folder that `asyncrl keys` made"
        )
    return KeyPair(public, secret)


def roles_by_key(keys: str) -> dict[bytes, str]:
    """Return public key -> role of all that may connect to the server. Raises ConfigError if a key is
    missing or unreadable."""
    return {public_key(keys, role): role for role in ROLES if role != "server"}


def _load(directory: Path, name: str) -> tuple[bytes, bytes | None]:
    path = directory / name
    if directory == Path():
        raise ConfigError(
            "replay.keys is empty here. Without keys, anyone could send groups to the learner (see `with_keys`)"
        )
    try:
        return load_certificate(str(path))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the key {path} cannot be read: {error}. `asyncrl keys DIR` makes keys; a machine needs all "
            f"*.key and the secrets of the roles that run on it"
        ) from error
