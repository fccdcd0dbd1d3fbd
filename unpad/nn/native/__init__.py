"""Native kernels, optional at every point: without them, or with UNPAD_NATIVE=0, torch computes the same."""
