"""What is told of a step: rows, samples, times, profiles. Nothing here changes what is trained."""
