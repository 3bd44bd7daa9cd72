"""The harness: methods take turns on one cluster in one run, and what they cost becomes records."""
