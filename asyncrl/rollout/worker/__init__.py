"""One rollout worker: its process, what it is made of, its loop, and what ends it when it stands still. How a group is
made is said in `groups`; other workers are nothing to it."""
