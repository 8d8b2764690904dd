"""The learner: `assembly` builds it, `train` is its main loop, and each sub-package is one concept. No engine, no
socket, no Hydra."""
