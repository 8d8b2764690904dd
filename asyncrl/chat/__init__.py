"""Chat: the only path from messages to token ids and back. `base` and `names` are light, and any package may import
them; `renderer` and `choice` load the rendering library, and only processes that have a tokenizer import them."""
