"""The learner: `assembly` puts it together, `train` is its loop, each room beside them is one concept. No engine, no
socket, no Hydra."""
