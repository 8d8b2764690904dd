"""Checks before a start what a role needs on its machine: files, model folder, optional packages."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from asyncrl.chat.hub import NAME, described_in
from asyncrl.checks.architecture import (
    experts_in,
    foreign_maths,
    longest_sequence,
    not_apart,
    not_in_blocks,
    not_of_text,
    not_replayed,
    not_shared,
    not_together,
    of_its_decoder,
    quantized,
    too_long_to_guess,
)
from asyncrl.checks.evaluations import eval_sets
from asyncrl.checks.hints import join_problems
from asyncrl.checks.installed_vllm import missing_vllm
from asyncrl.checks.parallel import ranks_divide
from asyncrl.checks.resources import missing_devices, missing_interfaces, taken_addresses, unwritable_folders
from asyncrl.checks.rewards import EXTRAS, MODEL_REWARD, reward_terms
from asyncrl.checks.sources import places, sources
from asyncrl.checks.user_code import learner_code
from asyncrl.errors import ConfigError, DataError
from asyncrl.schema import Config, LearnerSettings, ModelConfig, SinkSettings


def check_machine(config: Config, role: str, planned: bool = False) -> None:
    """Check the files and extras that `role` (`local`, `learner`, `rollout` or `replay`) needs here.

    Args:
        planned: nothing will be started. With `placement.gpus` the plan is for another machine, which has these GPUs,
            and vLLM if the run needs it.

    Raises:
        ConfigError: names everything that is missing.
    """
    problems: list[str] = []
    if role != "local" and config.learner.epochs > 0:
        problems.append(
            f"learner.epochs={config.learner.epochs:g} needs `asyncrl local`, which counts the rows and tells the "
            "other roles. Roles that you start one by one need learner.steps (`asyncrl local ... --dry-run` says how "
            "many)"
        )
    if role in ("local", "rollout"):
        problems += _missing_rows(config)
        # Without the `not in`, sets that share the training's rewards or environment would repeat its problems.
        for each in (config, *(one.config for one in eval_sets(config))):
            found = [*_missing_code("environment.name", each.environment.name), *_missing_of_rewards(each)]
            problems += [problem for problem in found if problem not in problems]
        problems += () if planned and config.placement.gpus else missing_vllm(config)
    if role in ("local", "learner", "rollout"):
        problems += missing_model("model.path", config.model.path)
        problems += unfit_model(config.model.path, config.learner, longest_sequence(config))
        problems += _no_routers(config)
        problems += _too_few_positions(config)
        problems += _too_few_tokens(config)
    if role in ("local", "learner"):
        reference = "" if config.reference.from_rollout else config.reference.path
        for key, path in (("critic.path", config.critic.path), ("reference.path", reference)):
            problems += missing_model(key, path, tokenizer=False) if path else ()
            problem = path and not_laid_out(model_settings(path), config.learner, trained=key == "critic.path")
            problems += [f"{key}={path}: {problem}"] if problem else []
    if role in ("local", "learner"):
        for key, spec in learner_code(config).items():
            problems += _missing_code(key, spec)
        problems += missing_extras(config.model, config.telemetry)
        problems += missing_checkpoint(config.resume)
        problems += unopenable("learner.copy_to", config.learner.copy_to)
        problems += unopenable("weights.url", config.weights.url)
    if config.replay.keys and not Path(config.replay.keys).is_dir():
        problems.append(
            f"replay.keys={config.replay.keys} is not a directory on this machine. Copy the run's keys there"
        )
    if role == "local" or (planned and role == "learner"):
        problems += ranks_divide(config.learner, config.learner.ranks, started=True)
    problems += missing_devices(config, role, planned)
    for find in (taken_addresses, missing_interfaces, unwritable_folders):
        problems += find(config, role)
    if problems:
        raise ConfigError(join_problems(problems))


def check_data(config: Config) -> None:
    """Raises ConfigError: rows of the data, or of an evaluated set, are missing here."""
    problems = list(_missing_rows(config))
    if problems:
        raise ConfigError(join_problems(problems))


def _missing_rows(config: Config) -> Iterator[str]:
    for source in (*sources(config.data), *(each.source for each in eval_sets(config))):
        try:
            places(source)
        except DataError as error:
            yield str(error)


def _missing_code(key: str, spec: str) -> Iterator[str]:
    where = spec.rpartition(":")[0]
    if where.endswith(".py") and not Path(where).is_file():
        yield f"{key}={spec}: there is no file {where} (looked from {Path.cwd()})"


def _missing_of_rewards(config: Config) -> Iterator[str]:
    for term in reward_terms(config.reward):
        key = term.room
        yield from _missing_code(f"{key}.function", term.function)
        if term.function == MODEL_REWARD:
            yield from missing_model(f"{key}.model", term.model)
        needed = EXTRAS.get(term.function)
        if needed and importlib.util.find_spec(needed[0]) is None:
            yield f"{term.function} needs the extra: pip install 'asyncrl[{needed[1]}]'"


def missing_model(key: str, path: str, tokenizer: bool = True) -> Iterator[str]:
    folder = Path(path)
    # `org/name` is a hub name; anything that starts like a path is a path.
    if path.startswith(("/", ".", "~")) and not folder.is_dir():
        yield f"{key}={path}: there is no such directory. Give the folder of a Hugging Face model"
    elif not folder.is_dir() and not NAME.fullmatch(path):
        yield (
            f"{key}={path}: there is no such folder (looked from {Path.cwd()}), and a model of the Hugging Face hub is "
            "named NAME or OWNER/NAME. Give one of the two"
        )
    elif adapter := model_settings(path, ADAPTER_FILE):
        yield f"{key}={path} {_unmerged(folder, adapter)}"
    elif folder.is_dir() and not (folder / "config.json").is_file():
        yield f"{key}={path} has no config.json. Give the folder of a Hugging Face model with its tokenizer"
    elif folder.is_dir():
        yield from (f"{key}={path} {problem}" for problem in _broken_model(folder, tokenizer))


ADAPTER_FILE = "adapter_config.json"
"""What peft writes beside an adapter."""


def _unmerged(folder: Path, adapter: dict[str, Any]) -> str:
    """Return why a folder with a PEFT adapter cannot be used, and how to merge it."""
    base = adapter.get("base_model_name_or_path") or "BASE"
    merge = (
        "AutoPeftModelForCausalLM of peft merges it: .from_pretrained(folder).merge_and_unload().save_pretrained(new), "
        "then save the tokenizer there too, and give the new folder"
    )
    if any(folder.glob("model*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        return (
            f"has a whole model and a PEFT adapter beside it ({ADAPTER_FILE}), which would be left out. If the adapter "
            f"belongs to the policy, {merge}; if not, move adapter_* out of the folder"
        )
    return f"is a PEFT adapter of {base} and not a whole model. {merge}"


def _no_routers(config: Config) -> Iterator[str]:
    settings = model_settings(config.model.path) if config.learner.router_replay else {}
    if settings and (problem := not_replayed(settings)):
        yield f"model.path={config.model.path}: {problem}"


CAUSAL = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
"""Suffixes of class names in `config.json` that have a language-model head."""


def unfit_model(path: str, learner: LearnerSettings, longest: int) -> Iterator[str]:
    """Report a model that would get a random head, computes what the learner does not, or does not fit the layout of
    the ranks.

    Args:
        longest: number of tokens of the longest sequence that is trained.
    """
    settings = model_settings(path)
    named = settings.get("architectures")
    classes = [str(name) for name in named] if isinstance(named, list) else []
    if classes and not any(name.endswith(CAUSAL) for name in classes):
        yield (
            f"model.path={path} is a {', '.join(classes)}, which has no head for the next token: one would be made at "
            "random. Give a causal LM (...ForCausalLM in its config.json)"
        )
    experts = learner.expert_parallel
    problem = settings and (
        not_of_text(settings)
        or quantized(settings)
        or foreign_maths(settings)
        or too_long_to_guess(settings, longest)
        or not_laid_out(settings, learner, trained=True)
    )
    if settings and experts > 1 and not experts_in(settings):
        problem = problem or (
            f"it has no experts that learner.expert_parallel={experts} could spread. Set learner.expert_parallel=1"
        )
    if problem:
        yield f"model.path={path}: {problem}"


def not_laid_out(settings: dict[str, Any], learner: LearnerSettings, *, trained: bool) -> str:
    """Return why the ranks cannot share such a model; empty if they can, or if nothing is known about it."""
    tensor = learner.tensor_parallel
    if not settings:
        return ""
    return (
        not_together(settings, tensor)
        or (not_in_blocks(settings, tensor) if trained and learner.optimizer == "adamw_8bit" else "")
        or not_shared(settings, learner.sequence_parallel, tensor)
        or not_apart(settings, learner.expert_parallel)
    )


def model_settings(path: str, name: str = "config.json") -> dict[str, Any]:
    """Return the content of a JSON file of the model; empty if there is none, for a hub model that is not available, or
    for a broken file, which is refused elsewhere."""
    try:
        settings = json.loads(((described_in(path) or Path(path)) / name).read_text())
    except (OSError, ValueError):
        return {}
    return settings if isinstance(settings, dict) else {}


def positions_of(path: str) -> int | None:
    """Return the number of positions of the model; None if its `config.json` does not say."""
    settings = model_settings(path)
    text = of_its_decoder(settings)
    positions = text.get("max_position_embeddings") or text.get("n_positions")
    return positions if isinstance(positions, int) else None


def _too_few_positions(config: Config) -> Iterator[str]:
    """Completions would be cut before `max_new_tokens`, and at worst never be worth a reward."""
    positions, held = positions_of(config.model.path), config.engine.max_model_len
    rooms = [(positions, f"the model of model.path has {positions} positions"), (held, f"engine.max_model_len={held}")]
    room, said = min(((tokens, said) for tokens, said in rooms if tokens), default=(0, ""))
    if not said or config.engine.name == "fake":
        return
    prompt = config.data.max_prompt_tokens
    wanted = {"rollout": config.rollout.max_new_tokens}
    wanted |= {each.key: each.config.rollout.max_new_tokens for each in eval_sets(config)}
    for key, tokens in wanted.items():
        if prompt + tokens > room and (key == "rollout" or tokens != wanted["rollout"]):
            yield (
                f"data.max_prompt_tokens={prompt} + {key}.max_new_tokens={tokens} = {prompt + tokens}, and {said}. "
                "Lower one of them"
            )


def _too_few_tokens(config: Config) -> Iterator[str]:
    vocabulary = of_its_decoder(model_settings(config.model.path)).get("vocab_size")
    if isinstance(vocabulary, int) and config.engine.record_topk > vocabulary:
        yield (
            f"engine.record_topk={config.engine.record_topk} is more than the {vocabulary} tokens in the vocabulary of "
            "model.path. Lower it"
        )


TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")


GENERATION = "generation_config.json"
"""File in which a chat model names the tokens that end a turn."""


def ends_of(path: str) -> set[int]:
    """Return the ids of the tokens that end a completion according to the model's `generation_config.json`, or its
    `config.json` if that names none."""
    generation, whole = model_settings(path, GENERATION), model_settings(path)
    for settings in (generation, whole, of_its_decoder(whole)):
        named = settings.get("eos_token_id")
        if ends := {each for each in (named if isinstance(named, list) else [named]) if isinstance(each, int)}:
            return ends
    return set()


def _broken_model(folder: Path, tokenizer: bool) -> Iterator[str]:
    """Report faults that would otherwise appear only after the start of every process, and again after each restart."""
    for name in ("config.json", GENERATION):
        try:
            settings = json.loads((folder / name).read_text()) if (folder / name).is_file() else {}
        except ValueError as error:
            yield f"has a {name} that is not valid JSON ({error}). Copy the model again"
        else:
            if not isinstance(settings, dict):
                yield f"has a {name} that is not a JSON object. Copy the model again"
    weights = [*folder.glob("*.safetensors"), *folder.glob("pytorch_model*.bin")]
    if not weights:
        yield "has no weights. Give a folder with *.safetensors (an unfinished download or a tokenizer alone has none)"
    yield from _broken_index(folder)
    for file in weights:
        if file.suffix == ".safetensors" and not _is_whole(file):
            yield f"has a damaged or half-written {file.name}. Copy the model again"
    # Without these files, transformers makes an empty tokenizer, which encodes every prompt as nothing.
    if tokenizer and not any(next(folder.glob(pattern), None) for pattern in TOKENIZER_FILES):
        yield "has no tokenizer. Save it there: AutoTokenizer.from_pretrained(...).save_pretrained(folder)"
    if tokenizer:
        yield from _unread_tokenizer(folder)


SENTENCEPIECE = b"\n"
"""First byte of a sentencepiece file. A tiktoken file begins otherwise; transformers reads it without sentencepiece."""


def _unread_tokenizer(folder: Path) -> Iterator[str]:
    if (folder / "tokenizer.json").is_file() or importlib.util.find_spec("sentencepiece") is not None:
        return
    for file in sorted(folder.glob("*.model")):
        with file.open("rb") as opened:
            if opened.read(1) == SENTENCEPIECE:
                yield (
                    f"has a sentencepiece tokenizer ({file.name}) and no tokenizer.json. To read it, install "
                    "sentencepiece on each machine of the run: pip install sentencepiece"
                )


def _broken_index(folder: Path) -> Iterator[str]:
    """Report a damaged index or missing files of a model in shards."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file() or not index.is_file():
        return
    try:
        named = {str(file) for file in json.loads(index.read_text())["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        yield f"has a damaged {index.name} ({type(error).__name__}: {error}). Copy the model again"
        return
    if absent := sorted(name for name in named if not (folder / name).is_file()):
        yield (
            f"lacks {len(absent)} of the {len(named)} files that its {index.name} names, {absent[0]} first. Finish the "
            "download"
        )


def _is_whole(file: Path) -> bool:
    """Return whether the file has the length that its header announces."""
    try:
        with safe_open(file, "np"):
            return True
    except SafetensorError:
        return False


def missing_checkpoint(resume: str) -> Iterator[str]:
    if resume not in ("never", "auto") and not Path(resume).is_dir():
        yield (
            f"resume={resume}: there is no such checkpoint (looked from {Path.cwd()}). Give a folder like "
            "runs/NAME/ckpt/step_50, or resume=auto for the newest of run.dir"
        )


def unopenable(key: str, url: str) -> Iterator[str]:
    """Report a URL that fsspec does not know, or for which a package is missing."""
    if not url:
        return
    try:  # imported here because it takes a tenth of a second, and few runs have a URL
        known = importlib.import_module("fsspec.utils").get_protocol(url)
        importlib.import_module("fsspec").get_filesystem_class(known)
    except (ValueError, ImportError) as error:
        yield f"{key}={url} is not a URL that fsspec can open here: {error}"


def missing_extras(model: ModelConfig, telemetry: SinkSettings) -> Iterator[str]:
    if model.lora_rank > 0 and importlib.util.find_spec("peft") is None:
        yield "model.lora_rank above 0 needs the extra: pip install 'asyncrl[lora]'. Or set model.lora_rank=0"
    for key, wanted, module in (
        ("telemetry.wandb", telemetry.wandb, "wandb"),
        ("telemetry.tensorboard", telemetry.tensorboard, "tensorboard"),
    ):
        if wanted and importlib.util.find_spec(module) is None:
            yield f"{key}=true needs the extra: pip install 'asyncrl[{module}]'. Or set {key}=false"
