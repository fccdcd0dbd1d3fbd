"""Import and export of models of other programs: folders of Hugging Face, and GGUF files."""
