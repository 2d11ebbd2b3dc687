"""Verdicts: is a challenger better than the champion, or was it luck? Statistics and policy; no files, no clock."""
