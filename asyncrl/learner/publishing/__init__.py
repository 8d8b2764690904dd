"""What accompanies a version of the weights: its canary, and an optimizer that changes only weights that have been
copied. How versions are sent is in `asyncrl.weights`."""
