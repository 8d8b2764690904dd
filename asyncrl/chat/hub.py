"""Fetches everything but the weights of a model from the Hugging Face hub, before a run starts, so that a wrong name or
an unusable chat template is found before each process looks for itself.
"""

from __future__ import annotations

import importlib
import logging
import re
from functools import cache
from pathlib import Path

from asyncrl.errors import ConfigError

log = logging.getLogger(__name__)

NAME = re.compile(r"(?!.*(--|\.\.))[A-Za-z0-9_](?:[\w.-]{0,94}\w)?(?:/[A-Za-z0-9_](?:[\w.-]{0,94}\w)?)?", re.ASCII)
"""Valid names of models on the hub."""
ALL_BUT_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")


@cache
def described_in(path: str, key: str = "model.path") -> Path | None:
    """The folder with config, tokenizer and chat template of a model: its own folder, or the one in the cache where
    transformers looks too, into which they are downloaded. None if the hub cannot be reached and the cache has nothing.

    Args:
        key: setting that names the model, for errors.

    Raises:
        ConfigError: the hub has no such model, or requires a login for it.
    """
    if Path(path).is_dir():
        return Path(path)
    if not NAME.fullmatch(path):
        return None  # reported together with missing folders
    hub = importlib.import_module("huggingface_hub")  # slow to import, and needed for hub names only
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        return Path(hub.snapshot_download(path, allow_patterns=list(ALL_BUT_WEIGHTS)))
    except errors.GatedRepoError as error:
        raise ConfigError(
            f"{key}={path}: this model is gated. Accept the terms on its page on the hub, and log in with `hf "
            "auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ConfigError(
            f"{key}={path}: there is no such folder (looked from {Path.cwd()}), and no such model on the Hugging "
            "Face hub. Correct the name, or log in with `hf auth login` if it is a private one"
        ) from error
    # No network, a broken connection (not an OSError here), a hub that is down, a full disk: asked again later.
    except (OSError, *errors.HfHubHTTPError.__bases__) as error:
        log.debug("%s cannot be looked at: %s", path, error)
        return None
