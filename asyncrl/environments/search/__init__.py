"""`environment.name=search`: a policy that asks a retriever. `environment` is the episode, `retriever` the worker's
side of the wire; `server` is a small retriever of our own, over `bm25` and a `corpus`, and knows none of the others."""
