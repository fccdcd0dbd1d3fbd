"""Data that come with the package: files in its folders, and pictures and patients that are drawn here."""
