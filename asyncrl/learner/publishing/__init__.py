"""What goes with a version of the weights: its canary, and an optimizer that changes only what is copied. How versions
travel is `asyncrl.weights`."""
