"""The formats of the files as typed records."""
