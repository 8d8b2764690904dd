"""The commands, one file each. They start processes and print; the logic is below."""
