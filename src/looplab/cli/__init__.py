"""The command line: parse, call the package, print. One module per group of commands, imported on use."""
