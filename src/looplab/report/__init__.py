"""What people read: the lab book, reports, plots, export."""
