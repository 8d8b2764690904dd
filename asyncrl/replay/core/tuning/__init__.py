"""`rollout.autotune`: controls how far rollouts run ahead. Only `tuner` accesses the run; the rest is arithmetic."""
