"""vLLM as the engine. `plugin.py` and the modules that it imports run inside vLLM's own worker processes; the rest runs
in the rollout worker. Nothing outside this package imports vllm."""
