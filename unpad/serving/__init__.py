"""A run behind HTTP: OpenAI's protocol and others, checked asks, one queue before one model; the extra `serve`."""
