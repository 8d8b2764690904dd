"""Engines started by others, over HTTP. Nothing in this package imports vllm, which need not be installed here."""
