"""`environment.name=search`: a policy that queries a retriever. `environment` is the episode, `retriever` the worker's
side of the wire; `server` is a small retriever of our own, over `bm25` and a `corpus`, independent of the others."""
