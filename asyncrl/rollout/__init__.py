"""Generates groups: `pool` keeps workers alive, `worker` is one worker, `groups` makes the groups, and `rewards` gets
their scores. `host` and `luggage` are shared by both sides of a worker's start. Nothing here knows what is done with a
group.
"""
