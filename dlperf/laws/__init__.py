"""Published formulas as pure functions of numbers and arrays, each with its paper, its equation and where it holds."""
