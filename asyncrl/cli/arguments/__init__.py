"""Arguments shared by several commands: values in Hydra's syntax, settings files, output files. `asyncrl.checks`
interprets the settings."""
