"""`pgqueue demo payments`: money moved once, while everything that can die dies, checked to the cent."""
