"""Optional shard processes that store payloads in place of the server: process, store, and the planner's record of
them."""
