"""The command line: each command with its options."""
