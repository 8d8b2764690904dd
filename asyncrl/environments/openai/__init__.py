"""`environment.name=openai`: an agent that talks to an OpenAI-compatible endpoint. `environment` and `agent` run it,
`endpoint` is the server that it talks to, `calls` records an episode token by token, and `requests` and `answers`
implement the protocol. Only these agents are served: the endpoint listens on loopback, and each episode has a key."""
