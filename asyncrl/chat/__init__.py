"""Chat: the one way from messages to token ids and back. `base` and `names` are light and known to every room;
`renderer` and `choice` load the library behind it, and only processes that have a tokenizer import them."""
