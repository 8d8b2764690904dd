"""Rows of datasets: one module per file format, all implementing `base.Rows`. Nothing here needs a tokenizer."""
