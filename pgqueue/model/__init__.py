"""What pgqueue decides: values and pure functions. No I/O, no clock, no chance."""
