"""Memory of training: the heap, what a pass takes, and passes that fit into what is there."""
