"""Rules that settings must keep, one small function each; `whole` asks them all. No file is read here, and no machine
is asked: that is above."""
