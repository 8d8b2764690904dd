"""Print a line of JSON with the GPUs that this process sees, then hold SHARE of the first one's memory until standard
input ends: `python -m tests.gpu.look SHARE`. It is prepared as a rank of the learner and cannot take more."""

from __future__ import annotations

import json
import logging
import os
import sys

import torch

from asyncrl.checks.placement import VISIBLE
from asyncrl.learner.parallel.place import Place, memory_of, prepare_process

SPARED = 0.9
"""Fraction of its share that is allocated. The rest is for what CUDA takes for the process itself."""


def main(share: float) -> None:
    place = Place.of(os.environ, "auto")
    prepare_process(place, logging.WARNING, share)
    seen = {"visible": os.environ[VISIBLE], "gpus": torch.cuda.device_count(), "held": 0.0}
    held = []
    if place.device.type == "cuda":
        whole = torch.cuda.get_device_properties(place.device).total_memory
        held.append(torch.empty(int(SPARED * memory_of(place.device, 1)), dtype=torch.uint8, device=place.device))
        seen |= {"name": torch.cuda.get_device_name(place.device), "held": held[0].nbytes / whole}
        try:
            torch.empty(int(0.2 * share * whole), dtype=torch.uint8, device=place.device)
        except torch.OutOfMemoryError:
            pass
        else:
            raise SystemExit(f"more than {share} of the memory was given to one process")
    print(json.dumps(seen), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(float(sys.argv[1]))
