"""The broadcast transport, both ends: a process group per epoch, buckets, deltas, staging. gloo and nccl alike."""
