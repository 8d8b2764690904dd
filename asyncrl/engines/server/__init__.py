"""Engines that somebody else started, over HTTP. Nothing in this room imports vllm: it need not be installed here."""
