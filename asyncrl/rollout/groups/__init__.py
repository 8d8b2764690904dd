"""Turns assignments into finished groups, and evaluation rows into scores; drops unwanted groups before they are sent,
and reports some of these. Uses no socket, and no particular engine."""
