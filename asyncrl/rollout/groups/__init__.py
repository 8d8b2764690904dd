"""From an assignment to a finished group, and from rows to be evaluated to their scores; which groups are dropped
before they travel, and what is shown of those. No socket and no engine by name."""
