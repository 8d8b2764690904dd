"""What makes groups: `pool` keeps workers alive, `worker` is one of them, `groups` is what it makes, `rewards` whom it
asks for scores; `host` and `luggage` are what both sides of a start know. What is done with a group is nothing to it.
"""
