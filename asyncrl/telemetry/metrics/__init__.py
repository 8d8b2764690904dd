"""Rows of `metrics.jsonl`: every metric, how a row is written, what evaluations are among them, and the alarms that are
read off them. Nothing here draws."""
