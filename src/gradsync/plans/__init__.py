"""Plans and profiles: pure data, read from JSON files and written to them."""
