"""From a lease to packed tensors: which trajectories go into which micro-batch, and where their tokens lie in it. No
model and no process group: only arithmetic on what the replay server sent."""
