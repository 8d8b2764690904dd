"""The replay: what is generated comes in, what is trained goes out, and each group is accounted for.

`protocol.py` is the seam that rollout and learner see, `config.py` the settings, `serving.py` the one place that wires
a server from the rooms: `core` (what is true), `codec` (bytes), `journal` (durable), `server`, `client`, `shards`,
`audit`, `net`. No torch, vllm or ray anywhere here."""
