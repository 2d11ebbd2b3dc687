"""The live page: a read-only web server over the ledger and the run folders, and the page that it serves."""
