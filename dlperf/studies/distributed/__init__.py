"""The study of data-parallel forecasts."""
