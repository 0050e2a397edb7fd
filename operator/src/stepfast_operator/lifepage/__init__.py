"""A job's life as one HTML file."""
