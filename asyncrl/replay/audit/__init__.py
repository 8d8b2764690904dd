"""What can be said of a run from its records alone: the auditor's own books, the ledger file, batches served again."""
