"""Policy and critic: loading, adapters, compiling, and their forward over a pack. No optimizer and no policy loss;
`roles` decides which models a run needs."""
