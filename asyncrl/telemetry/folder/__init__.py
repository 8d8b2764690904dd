"""The run folder: whose it is, where its settings came from, and what a resume may change. No metric is read here."""
