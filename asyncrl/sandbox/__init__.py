"""Programs that nobody vouches for, in processes of their own: `running.run` is the door.

What lives here knows Linux and nothing else of asyncrl: rewards and environments call it.
"""
