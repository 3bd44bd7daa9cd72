"""From records to what people read: tables, plots, a page, a trace."""
