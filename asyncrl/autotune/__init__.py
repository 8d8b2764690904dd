"""`rollout.autotune`: how far rollouts should run ahead, by what was measured. Pure arithmetic; it knows no replay."""
