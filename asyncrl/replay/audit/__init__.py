"""Checks a run from its records alone: the auditor's accounts, the ledger file, and batches served again."""
