"""What speculative decoding is worth, on texts that repeat their input and on open chat."""
