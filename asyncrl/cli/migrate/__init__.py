"""`asyncrl migrate`: translates settings of another framework one by one, and explains those without an equivalent."""
