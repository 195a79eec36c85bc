"""`pgqueue demo`: the whole system at work on files everybody has, and a check that nothing got lost."""
