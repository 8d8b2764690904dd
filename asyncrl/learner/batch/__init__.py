"""From a lease to packed tensors: which trajectories go into which micro-batch, and what of them lies where. No model
and no process group: plain arithmetic on what the replay has."""
