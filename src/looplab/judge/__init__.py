"""Verdicts: is a challenger better than the champion, or was it lucky? Statistics and policy; no files, no clock."""
