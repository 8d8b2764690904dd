"""Rows of `metrics.jsonl`: the registry of metrics, writing rows, evaluations among them, and alarms. Draws nothing."""
