"""The commands, one file each, which `main` loads; the subpackages are shared by several of them. Commands start
processes and print; the logic is in the other packages."""
