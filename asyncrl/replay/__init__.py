"""The replay: takes in generated groups, hands out batches for training, and accounts for every group.

`protocol.py` is the interface that rollout and learner use, and `serving.py` alone assembles a server from the
subpackages: `core` (state and decisions), `codec` (encoding), `journal` (durability), `server`, `client`,
`audit`, `net`. Nothing here imports torch, vllm or ray."""
