"""The version, in a file of its own so that nothing heavy is imported to learn it."""

VERSION = "0.1.0"
