"""What is looked at before a run starts or goes on: rows, prompts and rewards of its settings, the folder that it goes
on in. Nothing here starts a process of the run."""
