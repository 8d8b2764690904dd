"""One rollout worker: its process, its parts, its loop, and the watchdogs that end it when it hangs. How a group is
made is in `groups`; a worker does not know about other workers."""
