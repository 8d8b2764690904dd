"""The built-in engine: continuous batching over any Hugging Face causal LM, on one thread."""
