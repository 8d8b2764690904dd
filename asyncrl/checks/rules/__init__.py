"""Rules for settings, one small function each; `whole` checks all of them. They read no files and do not depend on the
machine; such checks are in the parent package."""
