"""`environment.name=reasoning_gym`: tasks of the package reasoning-gym. `tasks` imports it and runs in its own process,
since its scorers evaluate what a model wrote; `environment` is the episode, `rows` writes a data file."""
