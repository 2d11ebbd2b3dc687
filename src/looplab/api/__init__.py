"""The Python API: labs, studies and runs as typed objects. What is done here is what the command line does, on the
same study, ledger and files.

`looplab` itself exports the public names; `docs/api.md` is their page.
"""
