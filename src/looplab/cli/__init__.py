"""The command line: parse, call a room, print. One file a group of commands; nothing heavy is imported at start."""
