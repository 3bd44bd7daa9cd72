"""Files from elsewhere, which are read within bounds, and settings, which are held to their types."""
