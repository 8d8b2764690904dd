"""What workers, the learner and the host ask of the core. All changes of the durable state go through `Run.record`."""
