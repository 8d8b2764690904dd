"""What stands among the arguments of several commands: values as Hydra reads them, files of settings, the file that a
command is to make. What a setting means is said in `asyncrl.checks`."""
