"""Code that the benchmarks share. No module here answers a question of its own."""
