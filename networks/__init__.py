"""The networks of the papers, in plain torch; nothing here knows dlperf."""
