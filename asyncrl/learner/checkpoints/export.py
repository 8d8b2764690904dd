"""Exports trained models as plain Hugging Face folders: the folder that the model came from, with other weights.

Its other files are copied as they are. What transformers would write instead differs from them: `config.json` and
`tokenizer_config.json` name its own version, by which it chooses how to tokenize, and names of settings that older
programs do not read; `generation_config.json` is refused if `temperature` stands there without `do_sample`.
"""

from __future__ import annotations

import copy
import json
import logging
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import (
    AutoModelForCausalLM,
    AutoModelForTokenClassification,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)

from asyncrl.chat.hub import described_in
from asyncrl.chat.template import markers, without_parsers
from asyncrl.chat.turn_end import turn_end
from asyncrl.checks.machine import ends_of
from asyncrl.errors import CheckpointError, DiskFullError
from asyncrl.learner.model.building import compute_dtype
from asyncrl.learner.model.critic import CriticModel
from asyncrl.learner.model.layout import own_attention
from asyncrl.learner.model.lora import merged, save_adapter
from asyncrl.learner.model.packed import PackedModel
from asyncrl.learner.model.policy import WRAPPER_PREFIX, PolicyModel
from asyncrl.schema import ModelConfig
from asyncrl.storage.checkpoints import EXPORT_DIR, EXPORTED_FILE
from asyncrl.storage.full_disk import disk_space
from asyncrl.storage.sealed import MANIFEST, replacing

log = logging.getLogger(__name__)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TEMPLATES_DIR = "additional_chat_templates"
"""The only subfolder of a model in which transformers looks for something: chat templates other than the default."""
WEIGHTS = (
    *(".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx"),
    *(".onnx_data", ".npz"),
)
"""Endings of files that hold weights or the state of an optimizer; they are of the model before training."""


def export_hf(
    model: PolicyModel,
    config: ModelConfig,
    target: Path,
    rank: int,
    *,
    trained: int | None = None,
) -> None:
    """Write `target` so that `AutoModelForCausalLM.from_pretrained(target)` and vLLM load it. Collective.

    Weights are saved in `model.dtype`; a tied head is stored once. `target` appears only when it is complete. With
    LoRA the adapters are merged into it, and also saved next to it as `adapter/`, in peft's format.

    Args:
        trained: number of steps, recorded in `target` (`storage.checkpoints.trained_in`).
    """
    whole = gathered(model)
    if rank != 0:
        return
    if model.adapters is not None:
        adapters = model.adapters
        written(adapter_of(target), lambda aside: save_adapter(whole, adapters, aside), nbytes_of(whole))
        whole = merged(whole, model.adapters)
    plain = refilled(AutoModelForCausalLM, model.hf, whole, compute_dtype(config.dtype, model.device))
    plain.tie_weights()
    save(plain, config, target, trained)


def adapter_of(target: Path) -> Path:
    """Folder of the adapters that are merged into the model `target`, next to it."""
    return target.with_name("adapter" if target.name == EXPORT_DIR else f"{target.name}-adapter")


def export_critic(model: CriticModel, config: ModelConfig, target: Path, rank: int) -> None:
    """Write the critic with its value head to `target`, so that `critic.path=target` starts from it. Collective.

    Args:
        config: with the path that the critic was loaded from.
    """
    whole = gathered(model)
    if rank == 0:
        plain = refilled(AutoModelForTokenClassification, model.hf, whole, compute_dtype(config.dtype, model.device))
        save(plain, config, target)


def gathered(model: PackedModel) -> dict[str, torch.Tensor]:
    """Whole weights by Hugging Face name, on the CPU of rank 0; empty on the others. Collective."""
    weights = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {
        name.removeprefix(WRAPPER_PREFIX): tensor
        for name, tensor in weights.items()
        if isinstance(tensor, torch.Tensor)
    }


def refilled(
    kind: type[AutoModelForCausalLM] | type[AutoModelForTokenClassification],
    hf: PreTrainedModel,
    weights: dict[str, torch.Tensor],
    dtype: torch.dtype,
) -> PreTrainedModel:
    """A model like `hf`, without the learner's changes to it, that holds `weights`."""
    settings = copy.deepcopy(hf.config)
    settings._attn_implementation = own_attention(hf)  # ours exists in the learner only
    with torch.device("meta"):
        plain = kind.from_config(settings, dtype=dtype)
    plain.load_state_dict({name: tensor.to(dtype) for name, tensor in weights.items()}, assign=True)
    return plain


def nbytes_of(weights: Mapping[str, torch.Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in weights.values())


def written(target: Path, fill: Callable[[Path], None], nbytes: int) -> None:
    """Write `target`.

    Raises:
        CheckpointError: it cannot be written (permissions, a broken disk).
        DiskFullError: there was no space.
    """
    try:
        with disk_space(target, nbytes, (OSError, SafetensorError)), replacing(target) as aside:
            fill(aside)
    except DiskFullError:
        raise
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write the trained model to {target}: {error}. The checkpoint is whole: when the disk can be "
            "written, resume=auto or asyncrl export writes it again"
        ) from error


def save(plain: PreTrainedModel, config: ModelConfig, target: Path, trained: int | None = None) -> None:
    """Write `target` as the folder of `config.path` with the weights of `plain`. Raises as `source_of` and `written`.

    Args:
        config: of the model that was loaded.
        trained: see `export_hf`.
    """
    folder = source_of(config.path, target)
    companions = companions_in(folder)
    nbytes = nbytes_of(plain.state_dict()) + sum(file.stat().st_size for file in companions)

    def fill(aside: Path) -> None:
        write_weights(plain, aside)
        for file in companions:
            copy_to = aside / file.relative_to(folder)
            copy_to.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, copy_to)  # not its mode: a read-only file could not be changed by the user
        settings = config_like(read_settings(folder / CONFIG_FILE), read_settings(aside / CONFIG_FILE))
        (aside / CONFIG_FILE).write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
        declare_turn_ends(aside, config.chat)
        if trained is not None:
            (aside / EXPORTED_FILE).write_text(json.dumps({"trained_steps": trained}) + "\n")

    written(target, fill, nbytes)


def source_of(source: str, target: Path) -> Path:
    """The folder with everything but the weights of `source`. Raises CheckpointError: it cannot be read any more."""
    folder = described_in(source)
    if folder is None or not (folder / CONFIG_FILE).is_file():
        raise CheckpointError(
            f"cannot write the trained model to {target}: its tokenizer and settings are copied from {source}, which "
            "cannot be read any more. The checkpoint is whole: put that model back, then resume=auto or asyncrl export "
            "writes the trained one"
        )
    return folder


def companions_in(folder: Path) -> list[Path]:
    """Files of a model's folder that an export copies: all but weights, `config.json` and what an export writes."""
    templates = folder / TEMPLATES_DIR
    found = [*folder.iterdir(), *(templates.iterdir() if templates.is_dir() else ())]
    written_here = (CONFIG_FILE, MANIFEST, EXPORTED_FILE)
    return sorted(
        path
        for path in found
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(WEIGHTS)
        if path.name not in written_here
    )


def write_weights(plain: PreTrainedModel, folder: Path) -> None:
    """Write the weights to `folder`, and what transformers makes of the config. Raises OSError, SafetensorError."""
    # transformers refuses to save what it loads: generation settings in config.json, and those that contradict each
    # other in generation_config.json.
    for name in plain.config._get_generation_parameters():
        delattr(plain.config, name)
    plain.generation_config = GenerationConfig()
    plain.save_pretrained(folder)
    (folder / GENERATION_FILE).unlink(missing_ok=True)
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)  # safetensors makes them readable for the owner only, unlike config.json


def read_settings(file: Path) -> dict[str, Any]:
    """Content of a JSON object. Raises OSError."""
    try:
        settings = json.loads(file.read_text())
    except ValueError as error:
        raise OSError(f"{file} is not valid JSON any more ({error})") from error
    return settings if isinstance(settings, dict) else {}


LABELS = ("architectures", "id2label", "label2id", "num_labels")
"""Keys of `config.json` that say which class has the weights, and what a classifier's outputs are."""


def config_like(source: dict[str, Any], made: dict[str, Any]) -> dict[str, Any]:
    """`config.json` of an export: that of `source`, with the dtype and the class of `made`, by transformers.

    A text model that was taken out of a larger one has a config of its own, so `made` as a whole.
    """
    if source.get("model_type") != made.get("model_type"):
        return made
    kept = {name: value for name, value in source.items() if name not in (*LABELS, "quantization_config")}
    labels = {name: made[name] for name in LABELS if name in made}
    return labels | {"dtype": made["dtype"]} | with_dtype(kept, made["dtype"])


def with_dtype(settings: Any, dtype: str) -> Any:
    """The same settings with another dtype, in those of each part of the model as well."""
    if isinstance(settings, list):
        return [with_dtype(each, dtype) for each in settings]
    if not isinstance(settings, dict):
        return settings
    return {
        name: dtype if name in ("dtype", "torch_dtype") and isinstance(value, str) else with_dtype(value, dtype)
        for name, value in settings.items()
    }


def declare_turn_ends(folder: Path, options: Mapping[str, Any]) -> None:
    """Add the tokens that end a turn, according to the chat template, to `eos_token_id` in `generation_config.json`: an
    engine that knows only the EOS would let a model that learned another end write on.

    Args:
        options: of the chat template.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # the libraries raise nothing narrower; a model may have no tokenizer
        log.debug("%s has no tokenizer that can be loaded: %s", folder, error)
        return
    found = turn_end(tokenizer, markers(tokenizer), without_parsers(options)).token_ids
    file = folder / GENERATION_FILE
    settings = read_settings(file) if file.is_file() else {}
    known = sorted(ends_of(str(folder))) or [tokenizer.eos_token_id] * (tokenizer.eos_token_id is not None)
    if not set(found) <= set(known):
        settings["eos_token_id"] = [*known, *(token for token in found if token not in known)]
        file.write_text(json.dumps(settings, indent=2) + "\n")
