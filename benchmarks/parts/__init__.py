"""What the benchmarks share. Here is nothing that answers a question of its own."""
