"""The requests of workers, learner and host to the core. All changes of the durable state go through `Run.record`."""
