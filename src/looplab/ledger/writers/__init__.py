"""Writers of a study, by noun; `ledger/study.py` joins them."""
