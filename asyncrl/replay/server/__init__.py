"""The server's loop at its socket: sessions, handlers of verbs, waiting requests, replies. It decides nothing about
groups (`core` does), and knows no shard (`serving.py` adds their verbs)."""
