"""dlperf inside the trainers of other libraries, which are optional: one module for each."""
