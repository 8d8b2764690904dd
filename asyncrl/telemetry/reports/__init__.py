"""A run that is over, and several of them: summary, curves, the page. Nothing here needs a process of the run."""
