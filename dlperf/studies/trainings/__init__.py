"""The study of epoch forecasts."""
