"""`environment.name=gymnasium`: text games of the package gymnasium. Only `made` imports it."""
