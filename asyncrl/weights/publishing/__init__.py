"""The learner's side, whatever the transport: gather, cast and copy a version off the critical path."""
