"""Models and batches of other libraries, in and out. Only safetensors and JSON are read; nothing is unpickled."""
