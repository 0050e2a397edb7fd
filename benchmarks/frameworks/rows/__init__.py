"""One training each, by the framework's own means, saved in the way that it is told."""
