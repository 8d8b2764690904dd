"""What is refused at start, and what the refusal says. `rules` judges settings by themselves; here stands what settings
mean, and what they need of the machine (`machine`, `resources`). No torch."""
