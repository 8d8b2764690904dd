"""The broadcast transport, both ends: a process group per epoch, buckets, deltas, staging; the same for gloo and
nccl."""
