"""What a run measured: sources that read what trainers leave behind, and summaries of it."""
