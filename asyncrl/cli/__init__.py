"""The commands, one file each, which `main` loads; the rooms beside them are what several have in common. They start
processes and print; the logic is below."""
