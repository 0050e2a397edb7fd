"""One policy a module: pure functions of what was observed."""
