"""Native kernels, all optional: without them, or with UNPAD_NATIVE=0, torch computes the same."""
