"""Decides which prompt comes next: pure functions of the settings, the seed, the position in the stream, and the pass
rates measured on finished groups. Used by the rollout workers (which rows to read) and the replay server (which rows to
hand out). Nothing here opens a file or knows the content of a row.
"""
