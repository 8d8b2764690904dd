"""The learner's side of every transport: gather, cast and copy a version off the critical path."""
