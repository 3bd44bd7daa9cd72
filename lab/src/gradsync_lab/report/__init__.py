"""Turns records (one measured comparison each) into tables, plots, an HTML page and a Chrome trace."""
