"""What is reported of a step: rows, samples, times, profiles. Nothing here changes training."""
