"""Models of other programs: folders of Hugging Face, in and out."""
