"""One train step: scoring, targets, gradients and their reduction, the update, and its metrics. When steps are made,
saved and published is decided by `train`."""
