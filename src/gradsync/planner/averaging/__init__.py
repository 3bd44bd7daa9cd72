"""Plans that average parameters in groups of ranks that change from round to round (after DS-Sync)."""
