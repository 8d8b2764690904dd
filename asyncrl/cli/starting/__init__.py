"""Checks before a run starts or resumes: its rows, prompts and rewards, and the folder that it resumes in. They start
no process of the run."""
