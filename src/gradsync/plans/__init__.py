"""Plans and profiles as data, read from files and written to them."""
