"""`rollout.autotune`: how far rollouts run ahead. Only `tuner` knows a run; the rest computes with numbers."""
