"""Reports: turns records into tables, plots, an HTML page and a Chrome trace."""
