"""Workers kept alive until the run is over, as plain processes or under Ray, here or on the nodes of a cluster. No
torch: what a worker does is no matter here."""
