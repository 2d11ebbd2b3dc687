"""Lab book, reports, plots, tables and exports."""
