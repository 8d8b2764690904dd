"""One train step: scores, targets, gradients and when they meet, the update, and its numbers. When steps are made,
saved and published is up to `train`."""
