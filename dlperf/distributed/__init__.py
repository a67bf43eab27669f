"""Steps of many ranks: link fits, collectives, data-parallel forecasts, communication replay."""
