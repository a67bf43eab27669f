"""Published formulas as pure functions, each with its source and range of validity."""
