"""Rows of datasets, whatever they are kept in: one file per format, all behind `base.Rows`. No tokenizer."""
