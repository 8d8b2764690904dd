"""Check the learner on one GPU, alone and beside an engine, in a few minutes:

    python -m tests.gpu [--device cuda|cpu] [--model 0.6b|1.7b|4b] [--length TOKENS] [--only CHECK ...]

Prints a JSON line for each check. Needs torch, transformers, the learner's imports (hydra-core, msgpack, xxhash,
jaxtyping, fsspec) and psutil, but not pytest, vLLM, Ray or ZeroMQ. On a CPU the same code runs with a tiny model.

Larger models and longer sequences take longer: `--model 4b --length 16384 --only mfu memory`.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from asyncrl.learner.backends.factory import joined_ranks
from asyncrl.learner.parallel.place import prepare_process
from asyncrl.schema import Config
from tests.gpu import checks, together
from tests.gpu.scale import LARGE, QWEN3, TINY, Scale

CHECKS = checks.CHECKS | together.CHECKS


def run(scale: Scale, only: list[str]) -> int:
    """Run the checks `only`, print their results, and return the number of failed ones."""
    failed = 0
    prepare_process(scale.place, logging.WARNING)
    said = torch.cuda.get_device_name(scale.device) if scale.device.type == "cuda" else "CPU"
    print(json.dumps({"device": said, "torch": torch.__version__}), flush=True)
    with tempfile.TemporaryDirectory() as scratch, joined_ranks(Config(), scale.place) as backend:
        for name in only:
            began = time.perf_counter()
            try:
                line = {"check": name, "passed": True, "found": CHECKS[name](scale, Path(scratch), backend)}
            # Any error: the other checks are still worth running while there is a GPU.
            except Exception as error:
                logging.exception(name)
                line, failed = {"check": name, "passed": False, "found": f"{type(error).__name__}: {error}"}, failed + 1
            print(json.dumps(line | {"seconds": round(time.perf_counter() - began, 1)}), flush=True)
            gc.collect()  # a model in a cycle with its hooks still takes the memory that the next one needs
            if scale.device.type == "cuda":
                torch.cuda.empty_cache()
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--model", choices=[name for name in QWEN3 if name[0].isdigit()], help="of speed and memory")
    parser.add_argument("--length", type=int, default=0, help="tokens of the longest sequence of speed and memory")
    parser.add_argument("--only", choices=list(CHECKS), nargs="+", default=list(CHECKS))
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu runs the same code in tiny")
    scale = TINY if given.device == "cpu" else LARGE
    if given.model:
        scale = replace(scale, model=given.model)
    if given.length:
        if given.length <= scale.prompt:
            parser.error(f"--length must be more than the {scale.prompt} tokens of a prompt; got {given.length}")
        longer = max(scale.tokens, given.length)
        scale = replace(scale, completion=given.length - scale.prompt, tokens=longer)
    sys.exit(1 if run(scale, given.only) else 0)


if __name__ == "__main__":
    main()
