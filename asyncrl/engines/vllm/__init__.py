"""vLLM as the engine. `plugin.py` and what it loads run inside vLLM's own worker processes; the rest in the rollout
worker. Nothing outside this room imports vllm."""
